// accumulate_select: its arguments, their checks, and the computation of one entry.
#pragma once

#include "segments.h"
#include "select.h"

namespace hvd_compress {

// The deferred residual update of the last exchange.
struct Deferred {
  const uint8_t* indices;
  Segment segment;  // 0 slots: no update
  int64_t shift;    // the phase modulo blocks
  ResidualUpdate update;
};

// All arguments but the gradient and the weight, whose type varies.
struct AccumulateSelect {
  float* residual;
  float* velocity;     // or null
  float* block_means;  // or null
  const float* floor;
  int32_t* invalid;
  int32_t* touched;
  int64_t entries;
  float scale;
  float momentum;
  float decay;
  bool transform;
  Deferred deferred;
  Select select;

  // Whether scatter writes all of the gradient, so that it need not be set to 0.
  HVD_BODY bool keeps_gradient() const { return block_means || transform; }

  // The number of entries of this block without the padding.
  HVD_BODY int inside(int64_t block) const {
    int64_t left = entries - block * kBlock;
    return static_cast<int>(left < 0 ? 0 : left > kBlock ? kBlock : left);
  }
};

struct Entry {
  float residual;
  float velocity;
  bool usable;
};

HVD_BODY float magnitude(float value) {
  return bits_as<float>(bits_as<uint32_t>(value) & 0x7fffffffu);
}

// Whether a gradient, or a sum of gradients, may enter a state.
HVD_BODY bool is_usable(float value) { return magnitude(value) < kOverflow; }

// Whether a gradient may be transformed: an infinity would spread over its whole block.
HVD_BODY bool is_transformable(float value) { return magnitude(value) < kOverflow / kGain; }

// A block's mean from its sum, or 0 if that is not usable.
HVD_BODY float mean_of(float sum, int inside) {
  return is_usable(sum) ? sum / static_cast<float>(inside < 1 ? 1 : inside) : 0.0f;
}

// `step` is the scaled gradient. If it is not usable, the entry keeps its values. Without branches,
// so that loops are vectorised.
template <bool kVelocity>
HVD_BODY Entry accumulate(float step, float residual, float velocity, float momentum,
                          float decay = 1.0f) {
  bool usable = is_usable(step);
  if (kVelocity) step = velocity * momentum + step;
  float sum = residual * decay + step;
  return {usable ? sum : residual, usable ? step : velocity, usable};
}

HVD_BODY int32_t weighted_bits(float residual, float weight, float floor) {
  return score_bits(magnitude(residual) / (magnitude(weight) + floor));
}

inline Deferred checked_deferred(const Tensor& residual, const std::optional<Tensor>& velocity,
                                 const Tensor& own_indices, const std::optional<Tensor>& indices,
                                 const std::optional<Tensor>& mean,
                                 const std::optional<Tensor>& quantization_error, int64_t slots,
                                 int64_t first_slot, int64_t phase) {
  STD_TORCH_CHECK(
      indices.has_value() == mean.has_value() && mean.has_value() == quantization_error.has_value(),
      "deferred_indices, deferred_mean and deferred_error must be given together");
  if (!indices || residual.numel() == 0) return {nullptr, {0, 1, 0, 0}, 0, {}};
  check_flat(*indices, "deferred_indices", ScalarType::Byte, residual);
  check_no_overlap(*indices, "deferred_indices", own_indices, "indices");
  check_flat(*mean, "deferred_mean", ScalarType::Float, residual);
  check_numel(*mean, "deferred_mean", indices->numel());
  check_flat(*quantization_error, "deferred_error", ScalarType::Float, residual);
  check_numel(*quantization_error, "deferred_error", indices->numel());
  int64_t blocks = residual.numel() / kBlock;
  Segment segment{0, blocks, first_slot, slots};
  STD_TORCH_CHECK(fits(segment, blocks, indices->numel()),
                  "deferred_slots and deferred_first_slot must ", "lie within ", blocks,
                  " blocks and ", indices->numel(), " slots, got ", slots, " and ", first_slot);
  return {const_data<uint8_t>(*indices),
          segment,
          modulo(phase, blocks),
          {data<float>(residual), data_or_null(velocity), const_data<float>(*mean),
           const_data<float>(*quantization_error)}};
}

inline AccumulateSelect checked(const Tensor& grad, const Tensor& residual,
                                const std::optional<Tensor>& weight,
                                const std::optional<Tensor>& velocity, const Tensor& floor,
                                const Tensor& invalid, const Tensor& touched,
                                const std::optional<Tensor>& block_means, double scale,
                                double momentum, double decay, bool transform) {
  STD_TORCH_CHECK(!transform || (!weight && !block_means),
                  "transform goes without weight and block_means");
  check_residual(residual, velocity);
  check_dense(grad, "grad", residual);
  if (weight) {
    check_dense(*weight, "weight", residual);
    check_dtype(*weight, "weight", grad.scalar_type());
    check_numel(*weight, "weight", grad.numel());
  }
  STD_TORCH_CHECK(grad.numel() <= residual.numel(), "grad must have at most ", residual.numel(),
                  " entries, those of the residual, got ", grad.numel());
  check_flat(floor, "floor", ScalarType::Float, residual);
  check_numel(floor, "floor", 1);
  check_flat(invalid, "invalid", ScalarType::Int, residual);
  check_numel(invalid, "invalid", 1);
  check_flat(touched, "touched", ScalarType::Int, residual);
  check_numel(touched, "touched", 1);
  if (block_means) {
    check_flat(*block_means, "block_means", ScalarType::Float, residual);
    check_numel(*block_means, "block_means", residual.numel() / kBlock);
  }
  return {data<float>(residual),
          data_or_null(velocity),
          data_or_null(block_means),
          const_data<float>(floor),
          data<int32_t>(invalid),
          data<int32_t>(touched),
          grad.numel(),
          static_cast<float>(scale),
          static_cast<float>(momentum),
          static_cast<float>(decay),
          transform,
          {},
          {}};
}

}  // namespace hvd_compress
