// accumulate_select: its arguments, their checks, and the computation of one entry.
#pragma once

#include "select.h"

namespace hvd_compress {

struct AccumulateSelect {
  float* residual;
  float* velocity;     // or null
  float* block_means;  // or null
  const Piece* pieces;
  const float* floors;  // null without weights
  int32_t* invalid;
  int32_t* touched;
  Indices indices;
  int64_t blocks;  // of the bucket
  float scale;
  float momentum;
  float decay;
  bool transform;
  Draw draw;

  // Whether scatter writes all of the gradient, so that it need not be set to 0.
  HVD_BODY bool keeps_gradient() const { return block_means || transform; }
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

// Adds the weights to the gradients' rows.
inline void check_weights(const std::vector<Tensor>& weights, PieceTensors& grads,
                          const Tensor& residual) {
  if (weights.empty()) return;
  STD_TORCH_CHECK(weights.size() == grads.rows.size(), "weights must have ", grads.rows.size(),
                  " tensors, one per piece, got ", weights.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    PieceTensor& grad = grads.rows[i];
    if (grad.entries == 0) continue;
    check_dense(weights[i], "weights", residual);
    check_dtype(weights[i], "weights", grad.dtype);
    check_numel(weights[i], "weights", grad.entries);
    grad.weight = weights[i].const_data_ptr();
  }
}

inline AccumulateSelect checked(const Draw& draw, PieceTensors& tensors, const Tensor& residual,
                                const std::vector<Tensor>& weights,
                                const std::optional<Tensor>& velocity, const Tensor& pieces,
                                const Tensor& floors, const Tensor& indices, const Tensor& invalid,
                                const Tensor& touched, const std::optional<Tensor>& block_means,
                                double scale, double momentum, double decay, bool transform) {
  STD_TORCH_CHECK(!transform || (weights.empty() && !block_means),
                  "transform goes without weights and block_means");
  check_residual(residual, velocity);
  check_weights(weights, tensors, residual);
  if (!weights.empty()) {
    check_flat(floors, "floors", ScalarType::Float, residual);
    check_numel(floors, "floors", pieces.size(0));
  }
  check_flat(invalid, "invalid", ScalarType::Int, residual);
  check_numel(invalid, "invalid", 1);
  check_flat(touched, "touched", ScalarType::Int, residual);
  check_numel(touched, "touched", pieces.size(0));
  if (block_means) {
    check_flat(*block_means, "block_means", ScalarType::Float, residual);
    check_numel(*block_means, "block_means", residual.numel() / kBlock);
  }
  return {data<float>(residual),
          data_or_null(velocity),
          data_or_null(block_means),
          checked_pieces(pieces, residual),
          weights.empty() ? nullptr : const_data<float>(floors),
          data<int32_t>(invalid),
          data<int32_t>(touched),
          checked_indices(indices, residual),
          residual.numel() / kBlock,
          static_cast<float>(scale),
          static_cast<float>(momentum),
          static_cast<float>(decay),
          transform,
          draw};
}

}  // namespace hvd_compress
