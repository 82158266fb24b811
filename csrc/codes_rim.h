// What the arguments of all operators on codes have in common, checked: the same on every device.
#pragma once

#include "groups.h"
#include "rim.h"

namespace hvd_compress {

inline Groups check_groups(const Tensor& edges, const Tensor& values) {
  check_flat(values, "values", ScalarType::Float, values);
  check_flat(edges, "edges", ScalarType::Long, values);
  Groups groups{const_data<int64_t>(edges), edges.numel() - 1};
  STD_TORCH_CHECK(groups.count >= (values.numel() > 0 ? 1 : 0),
                  "edges has to have an entry more than there are groups, got ", edges.numel(),
                  " for ", values.numel(), " values");
  return groups;
}

// One entry a group.
inline void check_each(const Tensor& tensor, const char* name, ScalarType dtype,
                       const Groups& groups, const Tensor& values) {
  check_flat(tensor, name, dtype, values);
  check_numel(tensor, name, groups.count);
}

inline void check_lost(const Tensor& lost, const Tensor& values) {
  check_flat(lost, "lost", ScalarType::Float, values);
  check_numel(lost, "lost", values.numel());
  check_apart(lost, "lost", values, "values");
}

inline void check_codes(const Tensor& codes, int64_t bits, const Tensor& values) {
  check_flat(codes, "codes", ScalarType::Byte, values);
  check_numel(codes, "codes", (values.numel() + 7) / 8 * bits);
}

inline void check_range(const char* name, int64_t low, int64_t value, int64_t high) {
  STD_TORCH_CHECK(low <= value && value <= high, name, " has to be ", low, " to ", high, ", got ",
                  value);
}

}  // namespace hvd_compress
