// Pieces: the blocks and slots in a bucket of each parameter, or of each part of one.
#pragma once

#include "checks.h"

namespace hvd_compress {

// One row of the tensor `pieces`.
struct Piece {
  int64_t first_block;
  int64_t blocks;
  int64_t first_slot;
  int64_t slots;
};
static_assert(sizeof(Piece) == 4 * sizeof(int64_t));

constexpr int64_t kMaxSlots = int64_t{1} << 40;  // of a bucket, where its tensors do not tell
constexpr int64_t kMaxBlocks = kMaxSlots;

struct SlotRange {
  int64_t begin = 0;
  int64_t end = 0;
};

// The update of a slot's entry: `error` in the residual and 0 in the velocity, if the mean is
// finite.
struct ResidualUpdate {
  float* residual;
  float* velocity;  // or null
  const float* mean;
  const float* error;

  HVD_BODY bool applies(int64_t slot) const { return is_finite(mean[slot]); }

  HVD_BODY void write(int64_t slot, int64_t entry) const {
    residual[entry] = error[slot];
    if (velocity) velocity[entry] = 0.0f;
  }
};

// The slots of a bucket: the common arguments of gather and scatter.
struct BucketSlots {
  const uint8_t* indices;
  const Piece* pieces;
  int64_t piece_count;
  int64_t blocks;  // of the bucket
  int64_t slots;   // of the bucket
  int64_t phase;
};

// Whether a piece is within a bucket of `blocks` blocks and `slots` slots.
HVD_BODY bool fits(const Piece& piece, int64_t blocks, int64_t slots) {
  return 0 <= piece.first_block && 0 < piece.blocks && piece.blocks <= blocks - piece.first_block &&
         0 <= piece.slots && piece.slots <= piece.blocks * kBlock && 0 <= piece.first_slot &&
         piece.first_slot <= slots - piece.slots;
}

// The last row that begins at or before `block`, or -1. Rows ascend.
template <typename Row>
HVD_BODY int64_t find_row(const Row* rows, int64_t count, int64_t block) {
  int64_t low = 0, high = count;
  while (low < high) {
    int64_t middle = (low + high) / 2;
    if (rows[middle].first_block <= block) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low - 1;
}

// The table's contents are not checked here: on CUDA the host cannot read them.
inline const Piece* checked_pieces(const Tensor& pieces, const Tensor& other) {
  check_flat(pieces, "pieces", ScalarType::Long, other);
  STD_TORCH_CHECK(pieces.dim() == 2 && pieces.size(1) == 4, "pieces must be of shape (pieces, 4)");
  return const_data<Piece>(pieces);
}

inline BucketSlots checked_slots(const Tensor& residual, const Tensor& indices,
                                 const Tensor& pieces, int64_t phase) {
  check_flat(indices, "indices", ScalarType::Byte, residual);
  return {const_data<uint8_t>(indices),
          checked_pieces(pieces, residual),
          pieces.size(0),
          residual.numel() / kBlock,
          indices.numel(),
          phase};
}

// One piece's tensor of a list. `first_block` counts the blocks of all tensors before it.
struct PieceTensor {
  void* data;
  const void* weight;  // or null
  int64_t entries;     // 0: the piece is skipped
  int64_t first_block;
  int64_t blocks;
  ScalarType dtype;

  HVD_BODY int64_t entry_size() const { return dtype == ScalarType::Float ? 4 : 2; }

  // The number of entries of a block without the padding.
  HVD_BODY int inside(int64_t block) const {
    int64_t left = entries - block * kBlock;
    return static_cast<int>(left < 0 ? 0 : left > kBlock ? kBlock : left);
  }
};

struct PieceTensors {
  std::vector<PieceTensor> rows;
  int64_t blocks = 0;  // of all
};

// The tensors of a list, one per piece.
inline PieceTensors checked_tensors(const std::vector<Tensor>& tensors, const char* name,
                                    const Tensor& pieces) {
  STD_TORCH_CHECK(static_cast<int64_t>(tensors.size()) == pieces.size(0), name, " must have ",
                  pieces.size(0), " tensors, one per piece, got ", tensors.size());
  PieceTensors found;
  found.rows.reserve(tensors.size());
  for (const Tensor& tensor : tensors) {
    check_dense(tensor, name, pieces);
    int64_t entries = tensor.numel(), blocks = (entries + kBlock - 1) / kBlock;
    found.rows.push_back(
        {tensor.mutable_data_ptr(), nullptr, entries, found.blocks, blocks, tensor.scalar_type()});
    found.blocks += blocks;
  }
  return found;
}

}  // namespace hvd_compress
