// Moments of groups on the CPU, in parallel over parts. The running sums are adjacent, and 32
// values are added at once.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "../moments.h"
#include "isa.h"

namespace hvd_compress {

// The prefetch distance: one page, because the hardware prefetcher does not cross pages.
constexpr int64_t kAhead = 1024;

constexpr int64_t kGrain = 16;  // parts per thread, at least

// Joins the running sums of a part or of a group.
HVD_BODY Sums joined(double (&square)[kSums], double (&fourth)[kSums], float (&largest)[kSums]) {
  for (int width = kSums / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) {
      square[i] += square[i + width];
      fourth[i] += fourth[i + width];
      largest[i] = larger(largest[i + width], largest[i]);
    }
  }
  return {square[0], fourth[0], largest[0]};
}

struct PartMoments {
  static HVD_BODY Sums run(const float* values, int64_t count) {
    double square[kSums] = {}, fourth[kSums] = {};
    float largest[kSums] = {};
    int64_t whole = count - count % kSums;
    for (int64_t row = 0; row < whole; row += kSums) {
      const float* ahead = values + row + kAhead;  // in the next part, or beyond the last
      __builtin_prefetch(ahead);
      __builtin_prefetch(ahead + kSums / 2);
      for (int i = 0; i < kSums; ++i) {
        add_moments(values[row + i], square[i], fourth[i], largest[i]);
      }
    }
    for (int64_t i = 0; i < count - whole; ++i) {
      add_moments(values[whole + i], square[i], fourth[i], largest[i]);
    }
    return joined(square, fourth, largest);
  }
};

inline Sums group_moments(const Sums* parts, int64_t count) {
  if (count == 1) return *parts;  // as the sums of one part would be
  double square[kSums] = {}, fourth[kSums] = {};
  float largest[kSums] = {};
  for (int64_t i = 0; i < count; ++i) {
    square[i % kSums] += parts[i].square;
    fourth[i % kSums] += parts[i].fourth;
    largest[i % kSums] = larger(parts[i].largest, largest[i % kSums]);
  }
  return joined(square, fourth, largest);
}

// Calls work(group, sums) for all groups.
template <typename Work>
void for_moments(const Groups& groups, const float* values, const Work& work) {
  Parts parts{groups};
  std::vector<Sums> sums(parts.limit(groups.edges[groups.count]));
  torch::stable::parallel_for(0, sums.size(), kGrain, [&](int64_t begin, int64_t end) {
    int64_t group = begin < end ? parts.group(begin) : 0;
    for (int64_t number = begin; number < end; ++number) {
      while (group + 1 < groups.count && parts.first(group + 1) <= number) ++group;
      int64_t first = groups.edges[group] + (number - parts.first(group)) * kPart;
      int64_t count = std::min(groups.edges[group + 1] - first, kPart);
      if (count > 0) sums[number] = run_best<PartMoments>(values + first, count);
    }
  });
  for (int64_t group = 0; group < groups.count; ++group) {
    work(group, group_moments(&sums[parts.first(group)], parts.count(group)));
  }
}

}  // namespace hvd_compress
