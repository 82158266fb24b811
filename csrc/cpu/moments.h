// Moments of groups on the CPU: the running sums are adjacent, and 32 values are added at once.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "../moments.h"
#include "isa.h"

namespace hvd_compress {

// The prefetch distance: one page, because the hardware prefetcher does not cross pages.
constexpr int64_t kAhead = 1024;

struct GroupMoments {
  static HVD_BODY Sums run(const float* values, int64_t count) {
    double square[kSums] = {}, fourth[kSums] = {};
    float largest[kSums] = {};
    int64_t whole = count - count % kSums;
    for (int64_t row = 0; row < whole; row += kSums) {
      const float* ahead = values + std::min(row + kAhead, whole - kSums);
      __builtin_prefetch(ahead);
      __builtin_prefetch(ahead + kSums / 2);
      for (int i = 0; i < kSums; ++i) {
        add_moments(values[row + i], square[i], fourth[i], largest[i]);
      }
    }
    for (int64_t i = 0; i < count - whole; ++i) {
      add_moments(values[whole + i], square[i], fourth[i], largest[i]);
    }
    for (int width = kSums / 2; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) {
        square[i] += square[i + width];
        fourth[i] += fourth[i + width];
        largest[i] = larger(largest[i + width], largest[i]);
      }
    }
    return {square[0], fourth[0], largest[0]};
  }
};

// Calls work(group, sums) for all groups, in parallel over groups.
template <typename Work>
void for_moments(const Groups& groups, const float* values, const Work& work) {
  torch::stable::parallel_for(0, groups.count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      work(group, run_best<GroupMoments>(values + groups.edges[group], groups.size(group)));
    }
  });
}

}  // namespace hvd_compress
