// The arguments of accumulate_select, checked: the same on every device.
// What is due is checked by checked_due, and the second half, after all others, by checked_select.
#pragma once

#include "accumulate_select.h"
#include "select_rim.h"

namespace hvd_compress {

inline Due checked_due(const Tensor& residual, const std::optional<Tensor>& velocity,
                       const Tensor& picked, const std::optional<Tensor>& offsets,
                       const std::optional<Tensor>& mean, const std::optional<Tensor>& lost,
                       int64_t slots, int64_t first_slot, int64_t phase) {
  STD_TORCH_CHECK(offsets.has_value() == mean.has_value() && mean.has_value() == lost.has_value(),
                  "due_offsets, due_mean and due_lost go together");
  if (!offsets || residual.numel() == 0) return {nullptr, {0, 1, 0, 0}, 0, {}};
  check_flat(*offsets, "due_offsets", ScalarType::Byte, residual);
  check_apart(*offsets, "due_offsets", picked, "offsets");
  check_flat(*mean, "due_mean", ScalarType::Float, residual);
  check_numel(*mean, "due_mean", offsets->numel());
  check_flat(*lost, "due_lost", ScalarType::Float, residual);
  check_numel(*lost, "due_lost", offsets->numel());
  int64_t blocks = residual.numel() / kBlock;
  Segment segment{0, blocks, first_slot, slots};
  STD_TORCH_CHECK(fits(segment, blocks, offsets->numel()), "due_slots and due_first_slot have to ",
                  "lie within ", blocks, " blocks and ", offsets->numel(), " slots, got ", slots,
                  " and ", first_slot);
  return {const_data<uint8_t>(*offsets),
          segment,
          modulo(phase, blocks),
          {data<float>(residual), data_or_null(velocity), const_data<float>(*mean),
           const_data<float>(*lost)}};
}

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
  return {data<float>(residual),
          data_or_null(velocity),
          data_or_null(means),
          const_data<float>(floor),
          data<int32_t>(invalid),
          grad.numel(),
          static_cast<float>(scale),
          static_cast<float>(momentum),
          {},
          {}};
}

}  // namespace hvd_compress
