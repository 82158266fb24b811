// moments: its arguments, their checks, and the computation of one value.
//
// A group is summed in parts, which are independent of one another; then the parts' sums are.
#pragma once

#include "groups.h"

namespace hvd_compress {

constexpr int kSums = 32;        // running sums; see the specification
constexpr int64_t kPart = 8192;  // values per part

// The moments of one part or one group.
struct Sums {
  double square;
  double fourth;
  float largest;  // largest magnitude
};

struct Moments {
  const float* values;
  double* out;  // (groups, 3)
  Groups groups;
  int64_t size;  // number of values

  HVD_BODY void store(int64_t group, const Sums& sums) const {
    out[3 * group] = sums.square;
    out[3 * group + 1] = sums.fourth;
    out[3 * group + 2] = sums.largest;
  }
};

// The parts of all groups, by number. Groups have different numbers; some numbers have no part.
struct Parts {
  Groups groups;

  // A bound on the numbers for `values` values.
  HVD_BODY int64_t limit(int64_t values) const { return values / kPart + groups.count; }

  // The number of a group's first part. The groups before it have fewer parts than that.
  HVD_BODY int64_t first(int64_t group) const { return groups.edges[group] / kPart + group; }

  // The parts of a group.
  HVD_BODY int64_t count(int64_t group) const { return (groups.size(group) + kPart - 1) / kPart; }

  // The group that a number belongs to. Within the table for any edges.
  HVD_BODY int64_t group(int64_t number) const {
    int64_t low = 0, high = groups.count - 1;
    while (low < high) {
      int64_t middle = (low + high + 1) / 2;
      if (first(middle) <= number) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
};

HVD_BODY float larger(float magnitude, float largest) {
  return magnitude > largest ? magnitude : largest;  // ignores a NaN
}

HVD_BODY void add_moments(float value, double& square, double& fourth, float& largest) {
  double product = static_cast<double>(value) * static_cast<double>(value);
  square += product;
  fourth += product * product;
  largest = larger(bits_as<float>(bits_as<uint32_t>(value) & 0x7fffffffu), largest);
}

inline Moments checked(const Tensor& values, const Tensor& edges, const Tensor& out) {
  Groups groups = check_groups(edges, values);
  check_flat(out, "out", ScalarType::Double, values);
  STD_TORCH_CHECK(out.dim() == 2 && out.size(1) == 3, "out must be of shape (groups, 3)");
  check_numel(out, "out", 3 * groups.count);
  return {const_data<float>(values), data<double>(out), groups, values.numel()};
}

}  // namespace hvd_compress
