// The groups of a warp's tile, one group per lane.
//
// Constants has the constants of one group: Constants(args, group), and from(lane), which returns
// those of another lane.
#pragma once

#include "entries.h"
#include "groups.h"

namespace hvd_compress {

constexpr int kTileBlocks = 4;
constexpr int kWarpTile = kTileBlocks * kBlock;  // values per warp

template <typename Args, typename Constants>
class Window {
 public:
  // `first`: the tile's first value.
  __device__ Window(const Args& args, int64_t first) : args_(args), first_(first) { move_to(0); }

  // Calls work(i, constants) for this lane's values of the block that begins `at` values after the
  // tile's first. All lanes of the warp must call it.
  template <typename Work>
  __device__ __forceinline__ void for_block(int at, const Work& work) {
    int begin = groups_before(at), end = groups_before(at + kBlock - 1);
    if (end == kLanes) {
      move_to(at);
      begin = groups_before(at), end = groups_before(at + kBlock - 1);
    }
    if (begin == end) {
      Constants constants = constants_.from(begin % kLanes);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) work(i, constants);
    } else if (end < kLanes) {
      int lane[kPerLane];
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) lane[i] = begin;
      for (int k = begin; k < end; ++k) {
        int edge = __shfl_sync(kAll, edge_, k) - at;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) lane[i] += edge <= index_of(i);
      }
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) work(i, constants_.from(lane[i]));
    } else {  // more than 32 groups in a block: in local memory, so that the search is not unrolled
      Constants constants[kPerLane];
#pragma unroll 1
      for (int i = 0; i < kPerLane; ++i) {
        constants[i] = Constants(args_, args_.groups.find(first_ + at + index_of(i)));
      }
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) work(i, constants[i]);
    }
  }

 private:
  // Makes the group of the value `at` the first lane's.
  __device__ void move_to(int at) {
    const Groups& groups = args_.groups;
    int64_t value = first_ + at, last = groups.count - 1;
    int64_t group = last_begun(groups.count, share(groups.count, value, args_.size),
                               [&](int64_t i) { return groups.edges[i] <= value; });
    group += lane_id();
    int64_t end = first_ + kWarpTile, edge = group < last ? groups.edges[group + 1] : end;
    edge_ = static_cast<int>(max(first_, min(edge, end)) - first_);
    constants_ = Constants(args_, min(group, last));
  }

  // How many of the window's groups end at or before the value `at`.
  __device__ __forceinline__ int groups_before(int at) const {
    return __popc(__ballot_sync(kAll, edge_ <= at));
  }

  const Args& args_;
  int64_t first_;
  int edge_;  // where this lane's group ends in the tile; the last group, at its end
  Constants constants_;
};

}  // namespace hvd_compress
