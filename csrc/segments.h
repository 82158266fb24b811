// Segments: which parameter a block of the bucket belongs to, which slots it holds, and what those
// leave behind.
#pragma once

#include "block.h"

namespace hvd_compress {

struct Segment {  // one row of the tensor `segments`
  int64_t first_block;
  int64_t blocks;
  int64_t first_slot;
  int64_t slots;
};
static_assert(sizeof(Segment) == 4 * sizeof(int64_t));

struct SlotRange {
  int64_t begin = 0;
  int64_t end = 0;
};

// What a slot that counts leaves behind: `lost` in the residual, 0 in the velocity.
struct Remains {
  float* residual;
  float* velocity;  // or null
  const float* mean;
  const float* lost;

  HVD_BODY bool counts(int64_t slot) const { return is_finite(mean[slot]); }

  HVD_BODY void write(int64_t slot, int64_t entry) const {
    residual[entry] = lost[slot];
    if (velocity) velocity[entry] = 0.0f;
  }
};

// A bucket's slots, as take and put get them.
struct Picks {
  const uint8_t* offsets;
  const Segment* segments;
  int64_t segment_count;
  int64_t blocks;  // of the whole bucket
  int64_t slots;   // likewise
  int64_t phase;
};

// Whether no index made from this row can leave a bucket of so many blocks and slots.
HVD_BODY bool fits(const Segment& segment, int64_t blocks, int64_t slots) {
  return 0 <= segment.first_block && 0 < segment.blocks &&
         segment.blocks <= blocks - segment.first_block && 0 <= segment.slots &&
         segment.slots <= segment.blocks * kBlock && 0 <= segment.first_slot &&
         segment.first_slot <= slots - segment.slots;
}

// The last segment that begins at or before `block`, or -1. Segments ascend.
HVD_BODY int64_t find_segment(const Segment* segments, int64_t count, int64_t block) {
  int64_t low = 0, high = count;
  while (low < high) {
    int64_t middle = (low + high) / 2;
    if (segments[middle].first_block <= block) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low - 1;
}

}  // namespace hvd_compress
