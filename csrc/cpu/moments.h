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

constexpr int64_t kPartGrain = 16;  // parts per thread, at least

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

// The parts of groups, one after the other.
class PartIterator {
 public:
  PartIterator(const Parts& parts, int64_t number)
      : parts_(parts), number_(number), group_(parts.group(number)) {}

  int64_t number() const { return number_; }
  int64_t begin() const {
    return parts_.groups.edges[group_] + (number_ - parts_.first(group_)) * kPart;
  }
  // Not above begin() if there is no part of this number.
  int64_t end() const { return std::min(parts_.groups.edges[group_ + 1], begin() + kPart); }

  void next() {
    ++number_;
    while (group_ + 1 < parts_.groups.count && parts_.first(group_ + 1) <= number_) ++group_;
  }

 private:
  const Parts& parts_;
  int64_t number_, group_;
};

// Calls write(first, last), which writes these values, for all of them, in pieces that fit into the
// cache and begin at multiples of kPart, and work(group, sums) for all groups.
template <typename Write, typename Work>
void for_moments(const Groups& groups, const float* values, const Write& write, const Work& work) {
  Parts parts{groups};
  int64_t size = groups.edges[groups.count], limit = parts.limit(size);
  std::vector<Sums> sums(limit);
  std::vector<uint8_t> summed(limit);
  // Sums the parts that lie between these values.
  auto sum_parts = [&](PartIterator& part, int64_t first, int64_t last) {
    for (; part.number() < limit; part.next()) {
      int64_t begin = part.begin(), count = part.end() - begin;
      if (count <= 0 || begin < first || summed[part.number()]) continue;
      if (begin + count > last) break;
      sums[part.number()] = run_best<PartMoments>(values + begin, count);
      summed[part.number()] = true;
    }
  };
  torch::stable::parallel_for(
      0, (size + kPart - 1) / kPart, kPartGrain, [&](int64_t from, int64_t to) {
        int64_t start = from * kPart, group = groups.find(start);
        PartIterator part(parts, parts.first(group) + (start - groups.edges[group]) / kPart);
        for (int64_t first = start; first < std::min(to * kPart, size); first += kPart) {
          int64_t last = std::min(first + kPart, size);
          write(first, last);
          sum_parts(part, start, last);
        }
      });
  PartIterator part(parts, 0);
  if (size > 0) sum_parts(part, 0, size);  // those that two threads have written
  for (int64_t group = 0; group < groups.count; ++group) {
    work(group, group_moments(&sums[parts.first(group)], parts.count(group)));
  }
}

template <typename Work>
void for_moments(const Groups& groups, const float* values, const Work& work) {
  for_moments(groups, values, [](int64_t, int64_t) {}, work);
}

}  // namespace hvd_compress
