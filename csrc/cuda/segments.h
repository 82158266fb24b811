// A block's slots, found by its warp.
#pragma once

#include "warp.h"

namespace hvd_compress {

struct Range {
  int64_t begin = 0;
  int count = 0;
};

// The slots of a segment's block. `shift` is the phase, modulo blocks.
__device__ __forceinline__ Range slots_in(const Segment& segment, int64_t block, int64_t shift) {
  // 64-bit divisions are slow here: even lanes find where the slots begin, odd ones where they end.
  int64_t edge = slot_start(block + lane_id() % 2, segment.slots, segment.blocks, shift);
  edge += segment.first_slot;
  int64_t begin = __shfl_sync(kAll, edge, 0);
  return {begin, static_cast<int>(__shfl_sync(kAll, edge, 1) - begin)};
}

// What a block's slots leave behind; `first` is its first entry. The slots act in order: within a
// round of 32 the last lane of an entry writes it, and the barrier orders the rounds. Only a finite
// mean counts.
__device__ __forceinline__ void keep(const Remains& remains, const uint8_t* offsets, Range slots,
                                     int64_t first) {
  for (int round = 0; round < slots.count; round += kLanes) {
    int64_t slot = slots.begin + round + lane_id();
    bool active = round + lane_id() < slots.count;
    int offset = active ? offsets[slot] : 0;
    if (last_of_equals(offset, active && is_finite(remains.mean[slot]))) {
      remains.keep(slot, first + offset);
    }
    __syncwarp();
  }
}

struct Slots {
  Range range;
  int64_t segment = -1;  // its number, counted from the first of those searched; -1: in none
  int64_t entry = 0;     // the block's first one, counted within the segment
};

// The slots of a block in one of `count` segments; none where it is in none of them.
__device__ __forceinline__ Slots slots_of(const Picks& picks, const Segment* segments,
                                          int64_t count, int64_t block) {
  int64_t index = find_segment(segments, count, block);
  if (index < 0) return {};
  Segment segment = segments[index];
  if (!fits(segment, picks.blocks, picks.slots)) return {};  // the host cannot check this
  int64_t local = block - segment.first_block;
  if (local >= segment.blocks) return {};
  return {slots_in(segment, local, modulo(picks.phase, segment.blocks)), index, local * kBlock};
}

}  // namespace hvd_compress
