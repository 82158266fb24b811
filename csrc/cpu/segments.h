// What only the CPU can do with segments: check them, and walk them.
#pragma once

#include "../rim.h"

namespace hvd_compress {

// Ascending inside the residual, and dividing up all slots: after this no index can leave its
// tensor, no slot is left out and none is two threads' at once.
inline void check_segments(const Segment* segments, int64_t count, int64_t blocks, int64_t slots) {
  int64_t next = 0, slot = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Segment& s = segments[i];
    STD_TORCH_CHECK(next <= s.first_block && s.first_slot == slot && fits(s, blocks, slots),
                    "segments have to follow one another within ", blocks, " blocks and ", slots,
                    " slots, got first block ", s.first_block, ", blocks ", s.blocks,
                    ", first slot ", s.first_slot, ", slots ", s.slots, " in row ", i);
    next = s.first_block + s.blocks;
    slot += s.slots;
  }
  STD_TORCH_CHECK(slot == slots, "segments have to hold all ", slots, " slots, got ", slot);
}

constexpr int64_t kGroup = 64;  // blocks, a few hundred cache lines at most usual densities

// Calls work(segment's number, block, slots) for every block from begin to end. Slots lie far apart
// and every one is a cache miss, so each group of blocks is first shown to touch(), with the same
// arguments, to prefetch: then the misses overlap instead of following one another.
template <typename Touch, typename Work>
void for_blocks(const Segment* segments, int64_t count, int64_t begin, int64_t end, int64_t phase,
                const Touch& touch, const Work& work) {
  int64_t i = find_segment(segments, count, begin);
  for (i = i < 0 ? 0 : i; i < count && segments[i].first_block < end; ++i) {
    const Segment& segment = segments[i];
    int64_t last = segment.first_block + segment.blocks;
    last = last < end ? last : end;
    int64_t first = segment.first_block > begin ? segment.first_block : begin;
    for (; first < last; first += kGroup) {
      int64_t size = last - first < kGroup ? last - first : kGroup;
      Slots group[kGroup];
      for (int64_t k = 0; k < size; ++k) {
        group[k] = slots_of(segment, first + k, phase);
        touch(i, first + k, group[k]);
      }
      for (int64_t k = 0; k < size; ++k) work(i, first + k, group[k]);
    }
  }
}

}  // namespace hvd_compress
