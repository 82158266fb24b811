// The arguments of put, checked: the same on every device.
#pragma once

#include "rim.h"

namespace hvd_compress {

struct Put {
  Picks picks;
  Remains remains;  // without `lost` they are left due
  float scale;
  const float* block_means;  // or null
};

inline Put checked(const std::vector<Tensor>& grads, const Tensor& residual,
                   const std::optional<Tensor>& velocity, const Tensor& offsets,
                   const Tensor& segments, const Tensor& mean, const std::optional<Tensor>& lost,
                   int64_t phase, double scale, const std::optional<Tensor>& block_means) {
  check_residual(residual, velocity);
  Picks picks = checked_picks(residual, offsets, segments, phase);
  STD_TORCH_CHECK(static_cast<int64_t>(grads.size()) == picks.segment_count, "grads has to have ",
                  picks.segment_count, " tensors, one a segment, got ", grads.size());
  for (const Tensor& grad : grads) check_dense(grad, "every grad", residual);
  check_flat(mean, "mean", ScalarType::Float, residual);
  check_numel(mean, "mean", picks.slots);
  if (lost) {
    check_flat(*lost, "lost", ScalarType::Float, residual);
    check_numel(*lost, "lost", picks.slots);
  }
  if (block_means) {
    check_flat(*block_means, "block_means", ScalarType::Float, residual);
    check_numel(*block_means, "block_means", picks.blocks);
  }
  return {picks,
          {data<float>(residual), data_or_null(velocity), const_data<float>(mean),
           lost ? const_data<float>(*lost) : nullptr},
          static_cast<float>(scale),
          block_means ? const_data<float>(*block_means) : nullptr};
}

}  // namespace hvd_compress
