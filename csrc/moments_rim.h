// The arguments of moments, checked: the same on every device.
#pragma once

#include "codes_rim.h"
#include "moments.h"

namespace hvd_compress {

inline Moments checked(const Tensor& values, const Tensor& edges, const Tensor& out) {
  Groups groups = check_groups(edges, values);
  check_flat(out, "out", ScalarType::Double, values);
  STD_TORCH_CHECK(out.dim() == 2 && out.size(1) == 3, "out has to be of shape (groups, 3)");
  check_numel(out, "out", 3 * groups.count);
  return {const_data<float>(values), data<double>(out), groups, values.numel()};
}

}  // namespace hvd_compress
