// lanes_prepare and lanes_update: their arguments, their checks, and the computation of one group.
#pragma once

#include <cmath>

#include "groups.h"
#include "moments.h"

namespace hvd_compress {

// As in hvd_compress/reference/scales.py.
constexpr double kSmallest = 1e-20;
constexpr double kLargest = 1e20;
constexpr double kKurtosis = 4.5;
constexpr double kSmoothing = 0.25;
constexpr double kRatioSteps = 1024.0;

struct Scales {
  Groups groups;
  int64_t size;  // number of values
  const double* shared_scale;
  const int64_t* kind;
  int64_t ranks;
};

struct LanesPrepare {
  Scales scales;
  const float* values;
  const double* grid;
  int64_t kinds;
  const int32_t* invalid;
  float* step;
  int64_t* header;
};

struct LanesUpdate {
  Scales scales;
  float* mean;
  const int64_t* header;
  double* next_scale;
  int64_t* next_kind;
};

// A group's ratio is the lower or upper half of a word of `header`; this relies on the byte order.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

HVD_BODY uint32_t* ratio_of(int64_t* header, int64_t group) {
  return reinterpret_cast<uint32_t*>(header + 1) + group;
}

HVD_BODY const uint32_t* ratio_of(const int64_t* header, int64_t group) {
  return reinterpret_cast<const uint32_t*>(header + 1) + group;
}

HVD_BODY double bounded(double scale) {
  scale = scale > kSmallest ? scale : kSmallest;  // also for a NaN
  return scale < kLargest ? scale : kLargest;
}

HVD_BODY void prepare_group(const LanesPrepare& args, int64_t group, const Sums& sums) {
  double shared_scale = args.scales.shared_scale[group];
  int64_t count = args.scales.groups.size(group), kind = args.scales.kind[group];
  kind = kind < 0 || kind >= args.kinds ? 0 : kind;  // not checked on CUDA
  args.step[group] = static_cast<float>(shared_scale * args.grid[kind]);

  double rms = sqrt(sums.square / static_cast<double>(count < 1 ? 1 : count));
  double ratio = rint(rms / shared_scale * kRatioSteps);
  double most = static_cast<double>((int64_t{1} << 31) / args.scales.ranks - 1);
  uint32_t half = static_cast<uint32_t>(ratio < most ? ratio : most);
  memcpy(ratio_of(args.header, group), &half, sizeof(half));
  if (group == 0) args.header[0] = *args.invalid;
  if (group + 1 == args.scales.groups.count && group % 2 == 0) {
    uint32_t none = 0;
    memcpy(ratio_of(args.header, group + 1), &none, sizeof(none));
  }
}

HVD_BODY void update_group(const LanesUpdate& args, int64_t group, const Sums& sums) {
  double shared_scale = args.scales.shared_scale[group];
  int64_t count = args.scales.groups.size(group), kind = args.scales.kind[group];
  if (count > 0) {
    uint32_t half;
    memcpy(&half, ratio_of(args.header, group), sizeof(half));
    double product = shared_scale * static_cast<double>(half);
    double observed = product / (kRatioSteps * static_cast<double>(args.scales.ranks));
    shared_scale = bounded(shared_scale * (1.0 - kSmoothing) + observed * kSmoothing);
    double square = sums.square * sums.square;
    square = square < 1e-300 ? 1e-300 : square;
    kind = static_cast<double>(count) * sums.fourth / square > kKurtosis;
  }
  args.next_scale[group] = shared_scale;
  args.next_kind[group] = kind;
}

inline Scales checked_scales(const Tensor& values, const Tensor& edges, const Tensor& shared_scale,
                             const Tensor& kind, const Tensor& header, int64_t ranks) {
  Groups groups = check_groups(edges, values);
  STD_TORCH_CHECK(groups.count >= 1, "edges must have at least two entries, got ", edges.numel());
  check_each(shared_scale, "shared_scale", ScalarType::Double, groups, values);
  check_each(kind, "kind", ScalarType::Long, groups, values);
  check_flat(header, "header", ScalarType::Long, values);
  check_numel(header, "header", 1 + (groups.count + 1) / 2);
  check_range("ranks", 1, ranks, int64_t{1} << 30);
  return {groups, values.numel(), const_data<double>(shared_scale), const_data<int64_t>(kind),
          ranks};
}

inline LanesPrepare checked(const Tensor& values, const Tensor& edges, const Tensor& shared_scale,
                            const Tensor& kind, const Tensor& grid, const Tensor& invalid,
                            const Tensor& step, const Tensor& header, int64_t ranks) {
  Scales scales = checked_scales(values, edges, shared_scale, kind, header, ranks);
  check_flat(grid, "grid", ScalarType::Double, values);
  STD_TORCH_CHECK(grid.numel() >= 1, "grid must have an entry for each kind, got none");
  check_flat(invalid, "invalid", ScalarType::Int, values);
  check_numel(invalid, "invalid", 1);
  check_each(step, "step", ScalarType::Float, scales.groups, values);
  return {scales,
          const_data<float>(values),
          const_data<double>(grid),
          grid.numel(),
          const_data<int32_t>(invalid),
          data<float>(step),
          data<int64_t>(header)};
}

inline LanesUpdate checked(const Tensor& mean, const Tensor& edges, const Tensor& shared_scale,
                           const Tensor& kind, const Tensor& header, const Tensor& next_scale,
                           const Tensor& next_kind, int64_t ranks) {
  Scales scales = checked_scales(mean, edges, shared_scale, kind, header, ranks);
  check_each(next_scale, "next_scale", ScalarType::Double, scales.groups, mean);
  check_each(next_kind, "next_kind", ScalarType::Long, scales.groups, mean);
  return {scales, data<float>(mean), const_data<int64_t>(header), data<double>(next_scale),
          data<int64_t>(next_kind)};
}

}  // namespace hvd_compress
