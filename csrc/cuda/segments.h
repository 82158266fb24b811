// A block's slots, found by its warp.
#pragma once

#include "warp.h"

namespace hvd_compress {

// The slots of a segment's block. `shift` is the phase, modulo blocks.
__device__ __forceinline__ SlotRange slots_in(const Segment& segment, int64_t block,
                                              int64_t shift) {
  // 64-bit divisions are slow here: even lanes find where the slots begin, odd ones where they end.
  int64_t edge = slot_start(block + lane_id() % 2, segment.slots, segment.blocks, shift);
  edge += segment.first_slot;
  return {__shfl_sync(kAll, edge, 0), __shfl_sync(kAll, edge, 1)};
}

// Calls act(slot, index) for a block's slots that take part, as if one after the other: within a
// round of 32, of those with one index only the last acts, and a barrier orders the rounds.
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

// Writes what a block's slots leave behind; `entry` is the block's first.
__device__ __forceinline__ void update_residual(const ResidualUpdate& update,
                                                const uint8_t* indices, SlotRange slots,
                                                int64_t entry) {
  in_order(
      slots, indices, [&](int64_t slot) { return update.applies(slot); },
      [&](int64_t slot, int index) { update.write(slot, entry + index); });
}

struct BlockSlots {
  SlotRange range;
  int64_t segment = -1;  // its number, counted from the first of those searched; -1: in none
  int64_t entry = 0;     // the block's first one, counted within the segment
};

// The slots of a block in one of `count` segments; none where it is in none of them.
__device__ __forceinline__ BlockSlots slots_of(const BucketSlots& bucket, const Segment* segments,
                                               int64_t count, int64_t block) {
  int64_t index = find_segment(segments, count, block);
  if (index < 0) return {};
  Segment segment = segments[index];
  if (!fits(segment, bucket.blocks, bucket.slots)) return {};  // the host cannot check this
  int64_t local = block - segment.first_block;
  if (local >= segment.blocks) return {};
  return {slots_in(segment, local, modulo(bucket.phase, segment.blocks)), index, local * kBlock};
}

}  // namespace hvd_compress
