// Moments on CUDA: a warp sums one long part or four short ones, then one warp sums a group's
// parts.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "../moments.h"
#include "entries.h"
#include "groups.h"

namespace hvd_compress {

static_assert(kSums == kLanes);

// Joins the running sums of kSums / kEach adjacent lanes. The result is in the first of them.
template <int kEach>
__device__ __forceinline__ Sums joined(Sums (&sums)[kEach]) {
#pragma unroll
  for (int width = kSums / 2; width >= kEach; width /= 2) {
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      sums[k].square += __shfl_down_sync(kAll, sums[k].square, width / kEach);
      sums[k].fourth += __shfl_down_sync(kAll, sums[k].fourth, width / kEach);
      float largest = __shfl_down_sync(kAll, sums[k].largest, width / kEach);
      sums[k].largest = larger(largest, sums[k].largest);
    }
  }
#pragma unroll
  for (int width = kEach / 2; width > 0; width /= 2) {
#pragma unroll
    for (int k = 0; k < width; ++k) {
      sums[k].square += sums[k + width].square;
      sums[k].fourth += sums[k + width].fourth;
      sums[k].largest = larger(sums[k + width].largest, sums[k].largest);
    }
  }
  return sums[0];
}

// The part of a number.
struct Part {
  int64_t group;
  int64_t number;  // within the group
  int64_t begin;
  int64_t end;  // of the values; `begin` if there is no such part

  // `group`: of the number. `values`: how many there are. The edges were not checked on the host.
  __device__ Part(const Groups& groups, int64_t group, int64_t number_of_all, int64_t values)
      : group(group), number(number_of_all - Parts{groups}.first(group)), begin(0), end(0) {
    if (number < 0 || !groups.within(group, values)) {
      this->group = groups.count;  // none
      return;
    }
    end = groups.edges[group + 1];
    begin = min(groups.edges[group] + number * kPart, end);
    end = min(begin + kPart, end);
  }
};

// The group that a part's number belongs to, by a warp. Within the table for any edges.
__device__ __forceinline__ int64_t group_of_part(const Groups& groups, int64_t number,
                                                 int64_t values) {
  Parts parts{groups};
  return last_begun(groups.count, share(groups.count, number, parts.limit(values)),
                    [&](int64_t group) { return parts.first(group) <= number; });
}

// Whether a group is one part, or empty.
__device__ __forceinline__ bool one_part(const Groups& groups, int64_t group) {
  return Parts{groups}.count(group) <= 1;
}

// The running sums of `count` values from `from` on: a lane adds kEach adjacent ones of every 32.
template <int kEach, typename Word>
__device__ __forceinline__ void add_part(Sums (&sums)[kEach], const float* __restrict__ from,
                                         int count, int lane) {
  constexpr int kWords = kEach * sizeof(float) / sizeof(Word);
  constexpr int kRows = kEach == 1 ? 8 : 4;  // that are loaded together
  from += lane * kEach;
  int whole = count - count % kSums;
#pragma unroll kRows
  for (int row = 0; row < whole; row += kSums) {
    float value[kEach];
    Word words[kWords];
#pragma unroll
    for (int k = 0; k < kWords; ++k) words[k] = reinterpret_cast<const Word*>(from + row)[k];
    memcpy(value, words, sizeof(value));
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      add_moments(value[k], sums[k].square, sums[k].fourth, sums[k].largest);
    }
  }
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    if (whole + lane * kEach + k < count) {
      add_moments(from[whole + k], sums[k].square, sums[k].fourth, sums[k].largest);
    }
  }
}

// Each warp sums kEach successive parts, each with kSums / kEach lanes. With args.out, the moments
// of groups of one part are stored there.
template <int kEach>
static __global__ void __launch_bounds__(kThreads)
    parts_kernel(const __grid_constant__ Moments args, Sums* __restrict__ parts) {
  constexpr int kLanesEach = kSums / kEach;
  const Groups& groups = args.groups;
  int64_t limit = Parts{groups}.limit(args.size), first = warp_id() * kEach;
  if (first >= limit) return;
  int64_t number = first + lane_id() / kLanesEach;
  int64_t before = group_of_part(groups, first, args.size), group = before;
#pragma unroll
  for (int k = 1; k < kEach; ++k) {  // every group has a number
    int64_t next = before + k;
    group += next < groups.count && Parts{groups}.first(next) <= number;
  }
  Part part(groups, group, number, args.size);
  Sums sums[kEach]{};
  const float* from = args.values + part.begin;
  int count = static_cast<int>(part.end - part.begin), lane = lane_id() % kLanesEach;
  using Word = std::conditional_t<kEach == kAdjacent, Adjacent<float>, float>;
  if (kEach == 1 || on_16_bytes(from)) {
    add_part<kEach, Word>(sums, from, count, lane);
  } else {
    add_part<kEach, float>(sums, from, count, lane);
  }
  Sums all = joined(sums);
  if (lane > 0 || number >= limit) return;
  bool whole_group = part.number == 0 && part.group < groups.count && one_part(groups, part.group);
  if (args.out && whole_group) {
    args.store(part.group, all);
  } else {
    parts[number] = all;
  }
}

// The moments of a group that is within the values, in lane 0.
__device__ __forceinline__ Sums group_moments(const Groups& groups, const Sums* parts,
                                              int64_t group) {
  Sums sums[1]{};
  const Sums* first = parts + Parts{groups}.first(group);
#pragma unroll 4
  for (int64_t i = lane_id(), count = Parts{groups}.count(group); i < count; i += kLanes) {
    sums[0].square += first[i].square;
    sums[0].fourth += first[i].fourth;
    sums[0].largest = larger(first[i].largest, sums[0].largest);
  }
  return joined(sums);
}

// Whether most parts are so short that a warp shall sum several.
inline bool has_short_parts(const Groups& groups, int64_t values) {
  return values < Parts{groups}.limit(values) * (kPart / 4);
}

// The sums of all parts, on the device. With `out`, the moments of groups of one part are stored
// instead.
class PartSums {
 public:
  PartSums(const Launch& launch, const Tensor& values, const Groups& groups, double* out = nullptr)
      : memory_(torch::stable::new_empty(values, {bytes(values, groups)}, ScalarType::Byte)) {
    Moments args{const_data<float>(values), out, groups, values.numel()};
    int64_t limit = Parts{groups}.limit(args.size);
    if (has_short_parts(groups, args.size)) {
      unsigned grid = ceil_div(limit, kWarps * kAdjacent);
      launch.run(grid, parts_kernel<kAdjacent>, args, data<Sums>(memory_));
    } else {
      launch.run(grid_for(limit), parts_kernel<1>, args, data<Sums>(memory_));
    }
  }
  const Sums* get() const { return const_data<Sums>(memory_); }

 private:
  static int64_t bytes(const Tensor& values, const Groups& groups) {
    return Parts{groups}.limit(values.numel()) * static_cast<int64_t>(sizeof(Sums));
  }
  Tensor memory_;
};

// Launches the kernels that store the moments of all groups.
void store_moments(const Launch& launch, const Tensor& values, const Moments& args);

}  // namespace hvd_compress
