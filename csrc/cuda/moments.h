// A group's moments in a warp, a running sum to a lane: they are in its first lane afterwards.
#pragma once

#include "../moments.h"
#include "warp.h"

namespace hvd_compress {

static_assert(kSums == kLanes);

struct WarpMoments {
  double square = 0.0;
  double fourth = 0.0;
  float largest = 0.0f;

  __device__ WarpMoments(const float* values, int64_t begin, int64_t end) {
#pragma unroll 8
    for (int64_t i = begin + lane_id(); i < end; i += kLanes) {
      take_moments(values[i], square, fourth, largest);
    }
#pragma unroll
    for (int width = kLanes / 2; width > 0; width /= 2) {
      square += __shfl_down_sync(kAll, square, width);
      fourth += __shfl_down_sync(kAll, fourth, width);
      largest = larger(__shfl_down_sync(kAll, largest, width), largest);
    }
  }
};

}  // namespace hvd_compress
