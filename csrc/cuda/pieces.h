// The tensors and the slots of a block on CUDA, with one warp per block.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "../pieces.h"
#include "warp.h"

namespace hvd_compress {

// The rows of one launch in device memory. The host does not wait for the copy: it is made on the
// current stream, and torch keeps the pinned memory until it is done.
class DeviceRows {
 public:
  DeviceRows(const std::vector<PieceTensor>& rows, const Tensor& other)
      : memory_(bytes(rows.size(), other.device(), false)) {
    Tensor host =
        bytes(rows.size(), torch::stable::Device(torch::headeronly::DeviceType::CPU), HVD_PINNED);
    memcpy(host.mutable_data_ptr(), rows.data(), rows.size() * sizeof(PieceTensor));
    torch::stable::copy_(memory_, host, true);
  }

  const PieceTensor* data() const { return const_data<PieceTensor>(memory_); }

 private:
  static Tensor bytes(size_t rows, torch::stable::Device device, bool pinned) {
    int64_t size = static_cast<int64_t>(rows * sizeof(PieceTensor));
    return torch::stable::empty({size}, ScalarType::Byte, std::nullopt, device, pinned);
  }

  Tensor memory_;
};

// The blocks of all tensors of a launch.
struct TensorBlocks {
  const PieceTensor* rows;
  int64_t count;
  int64_t blocks;
};

// A block of one tensor, counted within it.
struct TensorBlock {
  int64_t number;  // of its piece
  PieceTensor tensor;
  Piece piece;
  int64_t block;
};

// Finds a block. Returns false if its piece is wrong, which is not checked on the host.
__device__ __forceinline__ bool find_block(const TensorBlocks& all, const Piece* pieces,
                                           int64_t bucket_blocks, int64_t block,
                                           TensorBlock& found) {
  found.number = find_row(all.rows, all.count, block);
  found.tensor = all.rows[found.number];
  found.piece = pieces[found.number];
  found.block = block - found.tensor.first_block;
  return found.piece.blocks == found.tensor.blocks && fits(found.piece, bucket_blocks, kMaxSlots);
}

// The slots of a piece's block. `shift` is the phase modulo blocks.
__device__ __forceinline__ SlotRange slots_in(const Piece& piece, int64_t block, int64_t shift) {
  // 64-bit divisions are slow: even lanes compute the begin, odd lanes the end.
  int64_t edge = slot_start(block + lane_id() % 2, piece.slots, piece.blocks, shift);
  edge += piece.first_slot;
  return {__shfl_sync(kAll, edge, 0), __shfl_sync(kAll, edge, 1)};
}

// Calls act(slot, index) for a block's slots for which part(slot) is true, with the result of a
// sequential loop: of 32 slots, only the last one of each index acts, and a barrier follows.
template <typename Part, typename Act>
__device__ __forceinline__ void in_order(SlotRange slots, const uint8_t* indices, const Part& part,
                                         const Act& act) {
  for (int64_t first = slots.begin; first < slots.end; first += kLanes) {
    int64_t slot = first + lane_id();
    bool active = slot < slots.end;
    int index = active ? indices[slot] : 0;
    if (last_of_equals(index, active && part(slot))) act(slot, index);
    __syncwarp();
  }
}

// Updates the residual at a block's slots; `entry` is the first entry of the block.
__device__ __forceinline__ void update_residual(const ResidualUpdate& update,
                                                const uint8_t* indices, SlotRange slots,
                                                int64_t entry) {
  in_order(
      slots, indices, [&](int64_t slot) { return update.applies(slot); },
      [&](int64_t slot, int index) { update.write(slot, entry + index); });
}

struct BlockSlots {
  SlotRange range;
  int64_t piece = -1;  // relative to the first piece searched; -1: none
  int64_t entry = 0;   // the first entry of the block within its piece
};

// The slots of a block of the bucket; empty if it is in no piece.
__device__ __forceinline__ BlockSlots slots_of(const BucketSlots& bucket, int64_t block) {
  int64_t number = find_row(bucket.pieces, bucket.piece_count, block);
  if (number < 0) return {};
  Piece piece = bucket.pieces[number];
  if (!fits(piece, bucket.blocks, bucket.slots)) return {};  // not checked on the host
  int64_t local = block - piece.first_block;
  if (local >= piece.blocks) return {};
  return {slots_in(piece, local, modulo(bucket.phase, piece.blocks)), number, local * kBlock};
}

}  // namespace hvd_compress
