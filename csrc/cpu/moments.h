// A group's moments on the CPU: the running sums lie side by side, and 32 values are added at once.
#pragma once

#include "../moments.h"

namespace hvd_compress {

struct GroupMoments {
  static HVD_BODY void run(const float* values, int64_t count, double* out) {
    double square[kSums] = {}, fourth[kSums] = {};
    float largest[kSums] = {};
    int64_t whole = count - count % kSums;
    for (int64_t row = 0; row < whole; row += kSums) {
      for (int i = 0; i < kSums; ++i) {
        take_moments(values[row + i], square[i], fourth[i], largest[i]);
      }
    }
    for (int64_t i = 0; i < count - whole; ++i) {
      take_moments(values[whole + i], square[i], fourth[i], largest[i]);
    }
    for (int width = kSums / 2; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) {
        square[i] += square[i + width];
        fourth[i] += fourth[i + width];
        largest[i] = larger(largest[i + width], largest[i]);
      }
    }
    out[0] = square[0];
    out[1] = fourth[0];
    out[2] = largest[0];
  }
};

}  // namespace hvd_compress
