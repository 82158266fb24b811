// The selection in one block on CUDA. Its scores are in the registers of a warp.
#pragma once

#include "../select.h"
#include "warp.h"

namespace hvd_compress {

constexpr int kFew = 8;            // up to this count, repeated argmax is faster than the search
constexpr int32_t kSelected = -1;  // below every score

struct LeaderSlots {
  int64_t begin;
  int count;
};

// The slots that this rank leads in a block: where they begin in `indices`, and their number.
__device__ __forceinline__ LeaderSlots leader_slots(const Select& select, int64_t block) {
  // 64-bit divisions are slow: even lanes compute the begin, odd lanes the end.
  int64_t edge = select.first_index(block + lane_id() % 2);
  int64_t begin = __shfl_sync(kAll, edge, 0);
  return {begin, static_cast<int>(__shfl_sync(kAll, edge, 1) - begin)};
}

// Both functions return the selected entries of this lane as bits. Lanes hold the block in order of
// index, so the lowest index is in the lowest lane, at the lowest bit.

// Selects the largest score `count` times.
__device__ __forceinline__ unsigned select_few(int32_t (&scores)[kPerLane], int count) {
  unsigned selected = 0;
  for (int k = 0; k < count; ++k) {
    int32_t best = kSelected;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) best = max(best, scores[i]);
    int32_t top = largest_of_all(best);
    bool mine = lane_id() == __ffs(__ballot_sync(kAll, best == top)) - 1;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (mine && scores[i] == top) {
        scores[i] = kSelected;
        selected |= 1u << i;
        mine = false;
      }
    }
  }
  return selected;
}

// Determines, bit by bit, the largest threshold that `count` scores reach. Selects the scores above
// it, and of those equal to it the lowest indices.
__device__ __forceinline__ unsigned select_many(const int32_t (&scores)[kPerLane], int count) {
  int32_t threshold = 0;
  for (int bit = 30; bit >= 0; --bit) {
    int32_t candidate = threshold | (1 << bit);
    int reached = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) reached += scores[i] >= candidate;
    reached = sum_of_all(reached);
    if (reached >= count) threshold = candidate;
    if (reached == count) break;
  }
  int larger = 0, equal = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    larger += scores[i] > threshold;
    equal += scores[i] == threshold;
  }
  int room = count - sum_of_all(larger) - sum_before(equal);
  unsigned selected = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (scores[i] > threshold || (scores[i] == threshold && room-- > 0)) selected |= 1u << i;
  }
  return selected;
}

// Writes the indices that this rank selects in a block. Modifies the scores.
__device__ __forceinline__ void select_block(const Select& select, int64_t block,
                                             int32_t (&scores)[kPerLane], LeaderSlots slots) {
  int64_t first = block * kBlock + lane_id() * kPerLane;
  if (select.explored(block)) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) scores[i] = explore_bits(scores[i], first + i, select.key);
  }
  unsigned selected =
      slots.count <= kFew ? select_few(scores, slots.count) : select_many(scores, slots.count);
  uint8_t* out = select.indices + slots.begin + sum_before(__popc(selected));
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (selected >> i & 1) *out++ = static_cast<uint8_t>(lane_id() * kPerLane + i);
  }
}

}  // namespace hvd_compress
