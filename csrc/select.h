// select: its arguments, their checks, and the score of one entry.
#pragma once

#include "pieces.h"

namespace hvd_compress {

// The arguments that accumulate_select and select share.
struct Draw {
  int64_t phase;
  int64_t run;
  int64_t ranks;
  int64_t position;
  uint32_t key;
  int64_t explore;
};

inline Draw checked_draw(int64_t phase, int64_t run, int64_t ranks, int64_t position, int64_t key,
                         int64_t explore) {
  constexpr int64_t kLimit = int64_t{1} << 31;  // so that run * ranks fits in 64 bits
  STD_TORCH_CHECK(1 <= run && run < kLimit, "run must be 1 to 2**31 - 1, got ", run);
  STD_TORCH_CHECK(1 <= ranks && ranks < kLimit, "ranks must be 1 to 2**31 - 1, got ", ranks);
  STD_TORCH_CHECK(0 <= position && position < ranks, "position must be 0 to ", ranks - 1, ", got ",
                  position);
  STD_TORCH_CHECK(0 <= key && key <= 0xFFFFFFFF, "key must be 0 to 2**32 - 1, got ", key);
  STD_TORCH_CHECK(0 <= explore && explore <= int64_t{1} << 32, "explore must be 0 to 2**32, got ",
                  explore);
  return {phase, run, ranks, position, static_cast<uint32_t>(key), explore};
}

// An operator whose last arguments are those of its first, a Draw.
template <auto kOperator>
struct DrawLast;

template <typename... Others, void (*kOperator)(Draw, Others...)>
struct DrawLast<kOperator> {
  static void run(Others... others, int64_t phase, int64_t run, int64_t ranks, int64_t position,
                  int64_t key, int64_t explore) {
    kOperator(checked_draw(phase, run, ranks, position, key, explore), std::move(others)...);
  }
};

// Where this rank writes its indices.
struct Indices {
  uint8_t* data;
  int64_t count;
};

inline Indices checked_indices(const Tensor& indices, const Tensor& other) {
  check_flat(indices, "indices", ScalarType::Byte, other);
  return {data<uint8_t>(indices), indices.numel()};
}

inline PieceTensors checked_scores(const std::vector<Tensor>& scores, const Tensor& pieces) {
  for (const Tensor& score : scores) check_flat(score, "scores", ScalarType::Float, pieces);
  return checked_tensors(scores, "scores", pieces);
}

// The slots of one piece.
struct Select {
  Draw draw;
  Piece piece;
  int64_t shift;  // the phase modulo blocks
  uint32_t key;   // of this piece

  HVD_BODY Select(const Draw& draw, const Piece& piece, int64_t number)
      : draw(draw),
        piece(piece),
        shift(modulo(draw.phase, piece.blocks)),
        key(mix(static_cast<uint32_t>(number), draw.key)) {}

  // Where this rank's indices of a block begin in `indices`; they end at first_index(block + 1).
  HVD_BODY int64_t first_index(int64_t block) const {
    int64_t slot = piece.first_slot + slot_start(block, piece.slots, piece.blocks, shift);
    return slots_before(slot, draw.run, draw.ranks, draw.position);
  }

  HVD_BODY bool explored(int64_t block) const {
    return mix(static_cast<uint32_t>(block), key ^ 0x5BD1E995u) < draw.explore;
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

}  // namespace hvd_compress
