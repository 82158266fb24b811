// One slot of put.
#pragma once

#include "segments.h"

namespace hvd_compress {

struct Put {
  float* residual;
  const uint8_t* offsets;
  const Segment* segments;
  int64_t segment_count;
  int64_t blocks;  // of the whole bucket
  int64_t slots;   // likewise
  int64_t phase;
  float scale;
};

// Whether what this rank sent has to come back: the sum was lost, but not by this rank.
HVD_BODY bool returns(float total, float sent) { return !is_finite(total) && is_finite(sent); }

}  // namespace hvd_compress
