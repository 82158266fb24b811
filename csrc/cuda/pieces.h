// The slots of a block on CUDA, with one warp per block.
#pragma once

#include "warp.h"

namespace hvd_compress {

// The slots of a piece's block. `shift` is the phase modulo blocks.
__device__ __forceinline__ SlotRange slots_in(const Piece& piece, int64_t block,
                                              int64_t shift) {
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
  int64_t entry = 0;     // the first entry of the block within its piece
};

// The slots of a block in `count` pieces; empty if it is in none of them.
__device__ __forceinline__ BlockSlots slots_of(const BucketSlots& bucket, const Piece* pieces,
                                               int64_t count, int64_t block) {
  int64_t index = find_piece(pieces, count, block);
  if (index < 0) return {};
  Piece piece = pieces[index];
  if (!fits(piece, bucket.blocks, bucket.slots)) return {};  // not checked on the host
  int64_t local = block - piece.first_block;
  if (local >= piece.blocks) return {};
  return {slots_in(piece, local, modulo(bucket.phase, piece.blocks)), index, local * kBlock};
}

}  // namespace hvd_compress
