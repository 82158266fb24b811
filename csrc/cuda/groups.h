// Tiles of values, searches for groups, and the constants of a value's group.
#pragma once

#include "../groups.h"
#include "warp.h"

namespace hvd_compress {

constexpr int kTile = 8 * kThreads;  // values per thread block, at most

// The last of `count` groups for which begins(group) is true, or 0. The warp reads 32 groups at a
// time, first those around `guess`: for groups of about equal sizes one read suffices. begins must
// be true for the groups up to some group. The result is below `count` for any begins.
template <typename Begins>
__device__ __forceinline__ int64_t last_begun(int64_t count, int64_t guess, const Begins& begins) {
  int64_t low = 0, high = count - 1, first = max(int64_t{0}, guess - kLanes / 2), step = 1;
  while (low < high) {
    int64_t group = first + lane_id() * step;
    int found = __popc(__ballot_sync(kAll, group <= high && begins(group)));
    if (found > 0) low = max(low, first + (found - 1) * step);
    if (found < kLanes) high = max(low, min(high, first + found * step - 1));
    first = low + 1;
    step = (high - low + kLanes - 1) / kLanes;
  }
  return low;
}

// `count` * `part` / `whole`, about.
__device__ __forceinline__ int64_t share(int64_t count, int64_t part, int64_t whole) {
  float ratio = static_cast<float>(count) / static_cast<float>(whole);
  return static_cast<int64_t>(static_cast<float>(part) * ratio);
}

// The constants of the current value's group, computed again only when the group changes.
template <typename Constants>
class OfGroup {
 public:
  template <typename Args>
  __device__ OfGroup(const Args& args, int64_t i)
      : group_(args.groups.find(i)), constants_(args, group_) {}

  template <typename Args>
  __device__ const Constants& at(const Args& args, int64_t i) {
    if (i >= args.groups.edges[group_ + 1]) {
      group_ = args.groups.find(i);
      constants_ = Constants(args, group_);
    }
    return constants_;
  }

 private:
  int64_t group_;
  Constants constants_;
};

}  // namespace hvd_compress
