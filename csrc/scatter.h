// scatter: its arguments, and their checks.
#pragma once

#include "pieces.h"

namespace hvd_compress {

struct Scatter {
  BucketSlots bucket;
  ResidualUpdate update;
  float scale;
  const float* block_means;  // or null
  bool transform;
  bool sign;
};

// The sign of a value as 1 or -1; 0 and NaN stay. Without branches, so that loops are vectorised.
HVD_BODY float sign_of(float value) {
  float one = bits_as<float>((bits_as<uint32_t>(value) & 0x80000000u) | 0x3f800000u);
  return (value < 0.0f) | (value > 0.0f) ? one : value;
}

inline Scatter checked(const Tensor& residual, const std::optional<Tensor>& velocity,
                       const Tensor& indices, const Tensor& pieces, const Tensor& mean,
                       const Tensor& quantization_error, int64_t phase, double scale,
                       const std::optional<Tensor>& block_means, bool transform, bool sign) {
  STD_TORCH_CHECK(!transform || !block_means, "transform goes without block_means");
  STD_TORCH_CHECK(transform || !sign, "sign goes with transform");
  check_residual(residual, velocity);
  BucketSlots bucket = checked_slots(residual, indices, pieces, phase);
  check_flat(mean, "mean", ScalarType::Float, residual);
  check_numel(mean, "mean", bucket.slots);
  check_flat(quantization_error, "quantization_error", ScalarType::Float, residual);
  check_numel(quantization_error, "quantization_error", bucket.slots);
  if (block_means) {
    check_flat(*block_means, "block_means", ScalarType::Float, residual);
    check_numel(*block_means, "block_means", bucket.blocks);
  }
  return {bucket,
          {data<float>(residual), data_or_null(velocity), const_data<float>(mean),
           const_data<float>(quantization_error)},
          static_cast<float>(scale),
          block_means ? const_data<float>(*block_means) : nullptr,
          transform,
          sign};
}

}  // namespace hvd_compress
