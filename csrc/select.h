// select: its arguments, their checks, and the score of one entry.
#pragma once

#include "checks.h"

namespace hvd_compress {

struct Select {
  uint8_t* indices;
  int64_t blocks;
  int64_t slots;
  int64_t first_slot;
  int64_t shift;  // the phase modulo blocks
  int64_t run;
  int64_t ranks;
  int64_t position;
  uint32_t key;
  int64_t explore;

  // Where this rank's indices of a block begin in `indices`; they end at first_index(block + 1).
  HVD_BODY int64_t first_index(int64_t block) const {
    return slots_before(first_slot + slot_start(block, slots, blocks, shift), run, ranks, position);
  }

  HVD_BODY bool explored(int64_t block) const {
    return mix(static_cast<uint32_t>(block), key ^ 0x5BD1E995u) < explore;
  }
};

// Scores are >= 0, so they have the same order as their bits, and integers are reduced faster. A
// NaN or a negative score counts as 0, because kSelected, -1, must be below every score.
HVD_BODY int32_t score_bits(float score) {
  uint32_t bits = bits_as<uint32_t>(score);
  return bits <= 0x7f800000u ? static_cast<int32_t>(bits) : 0;
}

HVD_BODY int32_t explore_bits(int32_t score, int64_t entry, uint32_t key) {
  float draw = exponential(mix(static_cast<uint32_t>(entry), key));
  return bits_as<int32_t>(bits_as<float>(score) / draw);
}

// `scored` is the tensor whose entries are selected, of whole blocks.
inline Select checked_select(const Tensor& scored, const Tensor& indices, int64_t slots,
                             int64_t first_slot, int64_t phase, int64_t run, int64_t ranks,
                             int64_t position, int64_t key, int64_t explore) {
  check_flat(indices, "indices", ScalarType::Byte, scored);
  constexpr int64_t kLimit = int64_t{1} << 31;  // so that run * ranks fits in 64 bits
  STD_TORCH_CHECK(0 <= slots && slots <= scored.numel(), "slots must be 0 to ", scored.numel(),
                  ", got ", slots);
  STD_TORCH_CHECK(0 <= first_slot && first_slot < (int64_t{1} << 40),
                  "first_slot must be 0 to 2**40, got ", first_slot);
  STD_TORCH_CHECK(1 <= run && run < kLimit, "run must be 1 to 2**31 - 1, got ", run);
  STD_TORCH_CHECK(1 <= ranks && ranks < kLimit, "ranks must be 1 to 2**31 - 1, got ", ranks);
  STD_TORCH_CHECK(0 <= position && position < ranks, "position must be 0 to ", ranks - 1, ", got ",
                  position);
  STD_TORCH_CHECK(0 <= key && key <= 0xFFFFFFFF, "key must be 0 to 2**32 - 1, got ", key);
  STD_TORCH_CHECK(0 <= explore && explore <= int64_t{1} << 32, "explore must be 0 to 2**32, got ",
                  explore);
  int64_t blocks = scored.numel() / kBlock;
  Select args{data<uint8_t>(indices),
              blocks,
              slots,
              first_slot,
              slots ? modulo(phase, blocks) : 0,
              run,
              ranks,
              position,
              static_cast<uint32_t>(key),
              explore};
  // Only this determines where indices are written, so they are written within the tensor.
  STD_TORCH_CHECK(slots == 0 || args.first_index(blocks) <= indices.numel(), "indices must have ",
                  slots ? args.first_index(blocks) : 0, " entries for these slots, got ",
                  indices.numel());
  return args;
}

}  // namespace hvd_compress
