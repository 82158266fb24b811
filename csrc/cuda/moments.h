// Moments on CUDA: one warp per part, with a running sum per lane; then one warp per group.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "../moments.h"
#include "warp.h"

namespace hvd_compress {

static_assert(kSums == kLanes);

// Joins the lanes' running sums. The result is in lane 0.
__device__ __forceinline__ Sums joined(Sums sums) {
#pragma unroll
  for (int width = kLanes / 2; width > 0; width /= 2) {
    sums.square += __shfl_down_sync(kAll, sums.square, width);
    sums.fourth += __shfl_down_sync(kAll, sums.fourth, width);
    sums.largest = larger(__shfl_down_sync(kAll, sums.largest, width), sums.largest);
  }
  return sums;
}

// The part of a number.
struct Part {
  int64_t group;
  int64_t number;  // within the group
  int64_t begin;
  int64_t end;  // of the values; `begin` if there is no such part

  // `values`: how many there are. The edges were not checked on the host.
  __device__ Part(const Groups& groups, int64_t number_of_all, int64_t values)
      : group(Parts{groups}.group(number_of_all)), number(0), begin(0), end(0) {
    number = number_of_all - Parts{groups}.first(group);
    if (number < 0 || !groups.within(group, values)) {
      group = groups.count;  // none
      return;
    }
    end = groups.edges[group + 1];
    begin = min(groups.edges[group] + number * kPart, end);
    end = min(begin + kPart, end);
  }
};

static __global__ void __launch_bounds__(kThreads)
    parts_kernel(Groups groups, int64_t size, const float* __restrict__ values,
                 Sums* __restrict__ parts) {
  int64_t number = warp_id();
  if (number >= Parts{groups}.limit(size)) return;
  Part part(groups, number, size);
  Sums sums{};
#pragma unroll 8
  for (int64_t i = part.begin + lane_id(); i < part.end; i += kLanes) {
    add_moments(values[i], sums.square, sums.fourth, sums.largest);
  }
  sums = joined(sums);
  if (lane_id() == 0) parts[number] = sums;
}

// The moments of a group that is within the values, in lane 0.
__device__ __forceinline__ Sums group_moments(const Groups& groups, const Sums* parts,
                                              int64_t group) {
  Sums sums{};
  const Sums* first = parts + Parts{groups}.first(group);
#pragma unroll 4
  for (int64_t i = lane_id(), count = Parts{groups}.count(group); i < count; i += kLanes) {
    sums.square += first[i].square;
    sums.fourth += first[i].fourth;
    sums.largest = larger(first[i].largest, sums.largest);
  }
  return joined(sums);
}

// The sums of all parts, on the device.
class PartSums {
 public:
  PartSums(const Launch& launch, const Tensor& values, const Groups& groups)
      : memory_(torch::stable::new_empty(values, {bytes(values, groups)}, ScalarType::Byte)) {
    launch.run(grid_for(Parts{groups}.limit(values.numel())), parts_kernel, groups, values.numel(),
               const_data<float>(values), data<Sums>(memory_));
  }
  const Sums* get() const { return const_data<Sums>(memory_); }

 private:
  static int64_t bytes(const Tensor& values, const Groups& groups) {
    return Parts{groups}.limit(values.numel()) * static_cast<int64_t>(sizeof(Sums));
  }
  Tensor memory_;
};

}  // namespace hvd_compress
