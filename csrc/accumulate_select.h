// One entry of accumulate_select.
#pragma once

#include "segments.h"
#include "select.h"

namespace hvd_compress {

// What the last exchange sent of these entries, which has yet to leave the residual.
struct Due {
  const uint8_t* offsets;
  Segment segment;  // no slots: nothing is due
  int64_t shift;    // the phase, modulo blocks
  Remains remains;
};

// Everything but the gradient and the weight, whose type varies.
struct AccumulateSelect {
  float* residual;
  float* velocity;  // or null
  float* means;     // or null; with them the gradient stays as it is: put writes all of it
  const float* floor;
  int32_t* invalid;
  int64_t entries;
  float scale;
  float momentum;
  Due due;
  Select select;

  // How many entries of this block are not padding.
  HVD_BODY int inside(int64_t block) const {
    int64_t left = entries - block * kBlock;
    return static_cast<int>(left < 0 ? 0 : left > kBlock ? kBlock : left);
  }
};

struct Entry {
  float residual;
  float velocity;
  bool finite;
};

// Of a block's sum. An infinity says nothing of the other entries: they are taken as they are.
HVD_BODY float mean_of(float sum, int inside) {
  float mean = sum / static_cast<float>(inside < 1 ? 1 : inside);
  return is_finite(mean) ? mean : 0.0f;
}

// Without a branch, for the vectoriser: an entry that would not be finite keeps what it had.
// `step` is the gradient, scaled.
template <bool kVelocity>
HVD_BODY Entry accumulate(float step, float residual, float velocity, float momentum) {
  if (kVelocity) step = velocity * momentum + step;
  float sum = residual + step;
  bool finite = is_finite(sum);
  return {finite ? sum : residual, finite ? step : velocity, finite};
}

HVD_BODY float magnitude(float value) {
  return bits_as<float>(bits_as<uint32_t>(value) & 0x7fffffffu);
}

HVD_BODY int32_t weighted_bits(float residual, float weight, float floor) {
  return score_bits(magnitude(residual) / (magnitude(weight) + floor));
}

}  // namespace hvd_compress
