// The Walsh-Hadamard transform of one block by a warp: the specification is
// hvd_compress/reference/hadamard.py.
#pragma once

#include "entries.h"

namespace hvd_compress {

__device__ __forceinline__ void combine(float& lower, float& upper) {
  float sum = lower + upper;
  upper = lower - upper;
  lower = sum;
}

// Entries 1 and 2 apart are in one lane, entries 4 to 64 apart in different lanes, entries 128
// apart in one lane.
__device__ __forceinline__ void hadamard_block(float (&values)[kPerLane]) {
#pragma unroll
  for (int half = 1; half < kAdjacent; half *= 2) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (!(i & half)) combine(values[i], values[i + half]);
    }
  }
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    bool upper = lane_id() & distance;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      float other = __shfl_xor_sync(kAll, values[i], distance);
      values[i] = upper ? other - values[i] : values[i] + other;
    }
  }
#pragma unroll
  for (int i = 0; i < kAdjacent; ++i) {
    combine(values[i], values[i + kAdjacent]);
    values[i] *= 1.0f / kGain;
    values[i + kAdjacent] *= 1.0f / kGain;
  }
}

}  // namespace hvd_compress
