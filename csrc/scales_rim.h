// The arguments of lanes_prepare and lanes_follow, checked: the same on every device.
#pragma once

#include "codes_rim.h"
#include "scales.h"

namespace hvd_compress {

inline Scales checked_scales(const Tensor& values, const Tensor& edges, const Tensor& shared,
                             const Tensor& kind, const Tensor& rest, int64_t ranks) {
  Groups groups = check_groups(edges, values);
  STD_TORCH_CHECK(groups.count >= 1, "edges has to have two entries at least, got ", edges.numel());
  check_each(shared, "shared", ScalarType::Double, groups, values);
  check_each(kind, "kind", ScalarType::Long, groups, values);
  check_flat(rest, "rest", ScalarType::Long, values);
  check_numel(rest, "rest", 1 + (groups.count + 1) / 2);
  check_range("ranks", 1, ranks, int64_t{1} << 30);
  return {groups, values.numel(), const_data<double>(shared), const_data<int64_t>(kind), ranks};
}

inline Prepare checked(const Tensor& values, const Tensor& edges, const Tensor& shared,
                       const Tensor& kind, const Tensor& grid, const Tensor& invalid,
                       const Tensor& step, const Tensor& rest, int64_t ranks) {
  Scales scales = checked_scales(values, edges, shared, kind, rest, ranks);
  check_flat(grid, "grid", ScalarType::Double, values);
  STD_TORCH_CHECK(grid.numel() >= 1, "grid has to have an entry for each kind, got none");
  check_flat(invalid, "invalid", ScalarType::Int, values);
  check_numel(invalid, "invalid", 1);
  check_each(step, "step", ScalarType::Float, scales.groups, values);
  return {scales,
          const_data<float>(values),
          const_data<double>(grid),
          grid.numel(),
          const_data<int32_t>(invalid),
          data<float>(step),
          data<int64_t>(rest)};
}

inline Follow checked(const Tensor& mean, const Tensor& edges, const Tensor& shared,
                      const Tensor& kind, const Tensor& rest, const Tensor& next_shared,
                      const Tensor& next_kind, int64_t ranks) {
  Scales scales = checked_scales(mean, edges, shared, kind, rest, ranks);
  check_each(next_shared, "next_shared", ScalarType::Double, scales.groups, mean);
  check_each(next_kind, "next_kind", ScalarType::Long, scales.groups, mean);
  return {scales, data<float>(mean), const_data<int64_t>(rest), data<double>(next_shared),
          data<int64_t>(next_kind)};
}

}  // namespace hvd_compress
