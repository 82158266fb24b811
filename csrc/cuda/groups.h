// How a thread block shares out values, and how a thread keeps to the group of its own.
#pragma once

#include "../groups.h"
#include "warp.h"

namespace hvd_compress {

constexpr int kTile = 8 * kThreads;  // values of a thread block, at most

// Makes a group's constants anew only where a value is of another group than the one before.
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
