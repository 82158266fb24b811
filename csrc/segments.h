// Segments: the blocks and slots of each parameter in a bucket.
#pragma once

#include "checks.h"

namespace hvd_compress {

// One row of the tensor `segments`.
struct Segment {
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
  const Segment* segments;
  int64_t segment_count;
  int64_t blocks;  // of the bucket
  int64_t slots;   // of the bucket
  int64_t phase;
};

// Whether a segment is within a bucket of `blocks` blocks and `slots` slots.
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

// The contents of `segments` are not checked here: on CUDA the host cannot read them.
inline BucketSlots checked_slots(const Tensor& residual, const Tensor& indices,
                                 const Tensor& segments, int64_t phase) {
  check_flat(indices, "indices", ScalarType::Byte, residual);
  check_flat(segments, "segments", ScalarType::Long, residual);
  STD_TORCH_CHECK(segments.dim() == 2 && segments.size(1) == 4,
                  "segments must be of shape (parameters, 4)");
  return {const_data<uint8_t>(indices),
          const_data<Segment>(segments),
          segments.size(0),
          residual.numel() / kBlock,
          indices.numel(),
          phase};
}

}  // namespace hvd_compress
