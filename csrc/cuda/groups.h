// Tiles of values, and the constants of a value's group.
#pragma once

#include "../groups.h"
#include "warp.h"

namespace hvd_compress {

constexpr int kTile = 8 * kThreads;  // values per thread block, at most

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
