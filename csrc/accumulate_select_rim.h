// The arguments of accumulate_select, checked: the same on every device.
// Those of its second half are checked after them, by checked_select.
#pragma once

#include "accumulate_select.h"
#include "select_rim.h"

namespace hvd_compress {

inline AccumulateSelect checked(const Tensor& grad, const Tensor& residual,
                                const std::optional<Tensor>& weight,
                                const std::optional<Tensor>& velocity, const Tensor& floor,
                                const Tensor& invalid, const std::optional<Tensor>& means,
                                double scale, double momentum) {
  check_residual(residual, velocity);
  check_dense(grad, "grad", residual);
  if (weight) {
    check_dense(*weight, "weight", residual);
    check_dtype(*weight, "weight", grad.scalar_type());
    check_numel(*weight, "weight", grad.numel());
  }
  STD_TORCH_CHECK(grad.numel() <= residual.numel(), "grad has to have at most ", residual.numel(),
                  " entries, those of the residual, got ", grad.numel());
  check_flat(floor, "floor", ScalarType::Float, residual);
  check_numel(floor, "floor", 1);
  check_flat(invalid, "invalid", ScalarType::Int, residual);
  check_numel(invalid, "invalid", 1);
  if (means) {
    check_flat(*means, "means", ScalarType::Float, residual);
    check_numel(*means, "means", residual.numel() / kBlock);
  }
  return {data<float>(residual),     data_or_null(velocity),       data_or_null(means),
          const_data<float>(floor),  data<int32_t>(invalid),       grad.numel(),
          static_cast<float>(scale), static_cast<float>(momentum), {}};
}

}  // namespace hvd_compress
