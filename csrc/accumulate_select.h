// One entry of accumulate_select, and how a rank finds what it leads.
#pragma once

#include "block.h"

namespace hvd_compress {

// Everything but the gradient and the weight, whose type varies.
struct AccumulateSelect {
  float* residual;
  float* velocity;  // or null
  const float* floor;
  uint8_t* offsets;
  int32_t* invalid;
  int64_t entries;
  int64_t blocks;
  float scale;
  float momentum;
  int64_t slots;
  int64_t first_slot;
  int64_t shift;  // the phase, modulo blocks
  int64_t run;
  int64_t ranks;
  int64_t position;
  uint32_t key;
  int64_t explore;

  // How many entries of this block are not padding.
  HVD_BODY int inside(int64_t block) const {
    int64_t left = entries - block * kBlock;
    return static_cast<int>(left < 0 ? 0 : left > kBlock ? kBlock : left);
  }

  // Where in `offsets` this rank's picks of a block begin; they end where the next block's begin.
  HVD_BODY int64_t place(int64_t block) const {
    return owned(first_slot + slot_start(block, slots, blocks, shift), run, ranks, position);
  }

  HVD_BODY bool explored(int64_t block) const {
    return mix(static_cast<uint32_t>(block), key ^ 0x5BD1E995u) < explore;
  }
};

struct Entry {
  float residual;
  float velocity;
  bool finite;
};

// Without a branch, for the vectoriser: an entry that would not be finite keeps what it had.
template <bool kVelocity>
HVD_BODY Entry accumulate(float grad, float residual, float velocity, float scale, float momentum) {
  float step = grad * scale;
  if (kVelocity) step = velocity * momentum + step;
  float sum = residual + step;
  bool finite = is_finite(sum);
  return {finite ? sum : residual, finite ? step : velocity, finite};
}

// Scores are >= 0, so they order like the integers of the same bits, which reduce faster.
HVD_BODY int32_t score_bits(float residual, float weight, float floor) {
  uint32_t magnitude = bits_as<uint32_t>(residual) & 0x7fffffffu;
  uint32_t width = bits_as<uint32_t>(weight) & 0x7fffffffu;
  float score = bits_as<float>(magnitude) / (bits_as<float>(width) + floor);
  return score == score ? bits_as<int32_t>(score) : 0;
}

HVD_BODY int32_t explore_bits(int32_t score, int64_t entry, uint32_t key) {
  float draw = exponential(mix(static_cast<uint32_t>(entry), key));
  return bits_as<int32_t>(bits_as<float>(score) / draw);
}

}  // namespace hvd_compress
