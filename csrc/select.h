// How a rank finds the slots it leads, and what an entry scores.
#pragma once

#include "block.h"

namespace hvd_compress {

struct Select {
  uint8_t* offsets;
  int64_t blocks;
  int64_t slots;
  int64_t first_slot;
  int64_t shift;  // the phase, modulo blocks
  int64_t run;
  int64_t ranks;
  int64_t position;
  uint32_t key;
  int64_t explore;

  // Where in `offsets` this rank's picks of a block begin; they end where the next block's begin.
  HVD_BODY int64_t place(int64_t block) const {
    return owned(first_slot + slot_start(block, slots, blocks, shift), run, ranks, position);
  }

  HVD_BODY bool explored(int64_t block) const {
    return mix(static_cast<uint32_t>(block), key ^ 0x5BD1E995u) < explore;
  }
};

// Scores are >= 0, so they order like the integers of the same bits, which reduce faster. What is
// not (a NaN, or a caller's mistake) counts as 0: no bits may be below those of a taken entry.
HVD_BODY int32_t score_bits(float score) {
  uint32_t bits = bits_as<uint32_t>(score);
  return bits <= 0x7f800000u ? static_cast<int32_t>(bits) : 0;
}

HVD_BODY int32_t explore_bits(int32_t score, int64_t entry, uint32_t key) {
  float draw = exponential(mix(static_cast<uint32_t>(entry), key));
  return bits_as<int32_t>(bits_as<float>(score) / draw);
}

}  // namespace hvd_compress
