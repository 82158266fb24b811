// The moments of a group, with one running sum per lane of a warp. The result is in lane 0.
#pragma once

#include "../moments.h"
#include "warp.h"

namespace hvd_compress {

static_assert(kSums == kLanes);

__device__ __forceinline__ Sums warp_moments(const float* values, const Groups& groups,
                                             int64_t group) {
  Sums sums{};
#pragma unroll 8
  for (int64_t i = groups.edges[group] + lane_id(), end = groups.edges[group + 1]; i < end;
       i += kLanes) {
    add_moments(values[i], sums.square, sums.fourth, sums.largest);
  }
#pragma unroll
  for (int width = kLanes / 2; width > 0; width /= 2) {
    sums.square += __shfl_down_sync(kAll, sums.square, width);
    sums.fourth += __shfl_down_sync(kAll, sums.fourth, width);
    sums.largest = larger(__shfl_down_sync(kAll, sums.largest, width), sums.largest);
  }
  return sums;
}

}  // namespace hvd_compress
