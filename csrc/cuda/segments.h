// A block's slots, found by its warp.
#pragma once

#include "warp.h"

namespace hvd_compress {

struct Slots {
  int64_t begin = 0;
  int count = 0;
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
  // 64-bit divisions are slow here: even lanes find where the slots begin, odd ones where they end.
  int64_t shift = modulo(picks.phase, segment.blocks);
  int64_t edge = slot_start(local + lane_id() % 2, segment.slots, segment.blocks, shift);
  edge += segment.first_slot;
  int64_t begin = __shfl_sync(kAll, edge, 0);
  int held = static_cast<int>(__shfl_sync(kAll, edge, 1) - begin);
  return {begin, held, index, local * kBlock};
}

}  // namespace hvd_compress
