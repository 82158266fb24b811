// Groups of values with one scale, and checks common to the operators on codes.
#pragma once

#include "checks.h"

namespace hvd_compress {

struct Groups {
  const int64_t* edges;  // (count + 1,)
  int64_t count;

  HVD_BODY int64_t size(int64_t group) const { return edges[group + 1] - edges[group]; }

  // Whether a group is within `values` values. On CUDA this is not checked on the host.
  HVD_BODY bool within(int64_t group, int64_t values) const {
    return 0 <= edges[group] && edges[group] <= edges[group + 1] && edges[group + 1] <= values;
  }

  // The group of value `i`: the last that begins at or before it. Within the table for any edges.
  HVD_BODY int64_t find(int64_t i) const {
    int64_t low = 0, high = count - 1;
    while (low < high) {
      int64_t middle = (low + high + 1) / 2;
      if (edges[middle] <= i) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
};

// The groups of `size` values. `other`: on their device.
inline Groups check_groups(const Tensor& edges, int64_t size, const Tensor& other) {
  check_flat(edges, "edges", ScalarType::Long, other);
  Groups groups{const_data<int64_t>(edges), edges.numel() - 1};
  STD_TORCH_CHECK(groups.count >= (size > 0 ? 1 : 0),
                  "edges must have one entry more than there are groups, got ", edges.numel(),
                  " for ", size, " values");
  return groups;
}

inline Groups check_groups(const Tensor& edges, const Tensor& values) {
  check_flat(values, "values", ScalarType::Float, values);
  return check_groups(edges, values.numel(), values);
}

// A tensor with one entry per group.
inline void check_each(const Tensor& tensor, const char* name, ScalarType dtype,
                       const Groups& groups, const Tensor& values) {
  check_flat(tensor, name, dtype, values);
  check_numel(tensor, name, groups.count);
}

inline void check_quantization_error(const Tensor& quantization_error, const Tensor& values) {
  check_flat(quantization_error, "quantization_error", ScalarType::Float, values);
  check_numel(quantization_error, "quantization_error", values.numel());
  check_no_overlap(quantization_error, "quantization_error", values, "values");
}

inline void check_codes(const Tensor& codes, int64_t bits, int64_t size, const Tensor& other) {
  check_flat(codes, "codes", ScalarType::Byte, other);
  check_numel(codes, "codes", (size + 7) / 8 * bits);
}

inline void check_codes(const Tensor& codes, int64_t bits, const Tensor& values) {
  check_codes(codes, bits, values.numel(), values);
}

inline void check_range(const char* name, int64_t low, int64_t value, int64_t high) {
  STD_TORCH_CHECK(low <= value && value <= high, name, " must be ", low, " to ", high, ", got ",
                  value);
}

}  // namespace hvd_compress
