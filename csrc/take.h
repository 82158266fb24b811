// One slot of take.
#pragma once

#include "segments.h"

namespace hvd_compress {

struct Take {
  float* residual;
  float* velocity;  // or null
  const uint8_t* offsets;
  const Segment* segments;
  const int32_t* invalid;
  int64_t segment_count;
  int64_t blocks;  // of the whole bucket
  int64_t slots;   // likewise
  int64_t phase;
  float limit;
};

// The payload of a step whose gradient was not finite.
template <typename P>
HVD_BODY P not_a_number() {
  return static_cast<P>(bits_as<float>(0x7fc00000u));
}

// What is sent of a value. A NaN passes, as through torch.clamp.
template <typename P>
HVD_BODY P clip(float value, float limit) {
  return static_cast<P>(value < -limit ? -limit : value > limit ? limit : value);
}

}  // namespace hvd_compress
