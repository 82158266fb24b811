// The selection in one block on CUDA. Its scores are in the registers of a warp.
#pragma once

#include "../select.h"
#include "entries.h"

namespace hvd_compress {

constexpr int kFew = 8;            // up to this count, repeated argmax is faster than the search
constexpr int32_t kSelected = -1;  // below every score

struct LeaderSlots {
  int64_t begin;
  int count;
};

// The slots that this rank leads in a block: where they begin in `indices`, and their number. None
// if the indices have no room, which is not checked on the host.
__device__ __forceinline__ LeaderSlots leader_slots(const Select& select, int64_t block,
                                                    const Indices& indices) {
  // 64-bit divisions are slow: even lanes compute the begin, odd lanes the end.
  int64_t edge = select.first_index(block + lane_id() % 2);
  int64_t begin = __shfl_sync(kAll, edge, 0), end = __shfl_sync(kAll, edge, 1);
  return {begin, end <= indices.count ? static_cast<int>(end - begin) : 0};
}

// Numbers in the order of the block's entries: first come all lanes' entries of the first part.
struct Places {
  int first;
  int second;

  __device__ int& of(int i) { return i < kAdjacent ? first : second; }
};

// For the numbers of something in this lane's two parts, how many are before each part.
__device__ __forceinline__ Places places_before(int first, int second) {
  int both = first | second << 16;  // a sum over all lanes is at most 128 each
  int before = sum_before(both);
  int all_first = __shfl_sync(kAll, before + both, kLanes - 1) & 0xffff;
  return {before & 0xffff, all_first + (before >> 16)};
}

// Both functions return the selected entries of this lane as bits.

// Selects the largest score `count` times.
__device__ __forceinline__ unsigned select_few(int32_t (&scores)[kPerLane], int count) {
  unsigned selected = 0;
  for (int k = 0; k < count; ++k) {
    int32_t best = kSelected, first = kSelected;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      best = max(best, scores[i]);
      if (i < kAdjacent) first = best;
    }
    int32_t top = largest_of_all(best);
    // Of several, the lowest index: in the first part of the lowest lane, or else in the second.
    unsigned in_first = __ballot_sync(kAll, first == top);
    unsigned in_any = __ballot_sync(kAll, best == top);
    bool mine = lane_id() == __ffs(in_first ? in_first : in_any) - 1;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (mine && scores[i] == top) {
        scores[i] = kSelected;
        selected |= 1u << i;
        mine = false;
      }
    }
  }
  return selected;
}

// Determines, bit by bit, the largest threshold that `count` scores reach. Selects the scores above
// it, and of those equal to it the lowest indices.
__device__ __forceinline__ unsigned select_many(const int32_t (&scores)[kPerLane], int count) {
  int32_t threshold = 0;
  for (int bit = 30; bit >= 0; --bit) {
    int32_t candidate = threshold | (1 << bit);
    int reached = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) reached += scores[i] >= candidate;
    reached = sum_of_all(reached);
    if (reached >= count) threshold = candidate;
    if (reached == count) break;
  }
  int larger = 0;
  Places equal{};
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    larger += scores[i] > threshold;
    equal.of(i) += scores[i] == threshold;
  }
  int room = count - sum_of_all(larger);
  Places place = places_before(equal.first, equal.second);
  unsigned selected = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    bool also = scores[i] == threshold && place.of(i)++ < room;
    if (scores[i] > threshold || also) selected |= 1u << i;
  }
  return selected;
}

// Writes the indices that this rank selects in a block. Modifies the scores.
__device__ __forceinline__ void select_block(const Select& select, int64_t block,
                                             int32_t (&scores)[kPerLane], LeaderSlots slots,
                                             const Indices& indices) {
  if (select.explored(block)) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      scores[i] = explore_bits(scores[i], block * kBlock + index_of(i), select.key);
    }
  }
  unsigned selected =
      slots.count <= kFew ? select_few(scores, slots.count) : select_many(scores, slots.count);
  constexpr unsigned kFirst = (1u << kAdjacent) - 1;
  Places place = places_before(__popc(selected & kFirst), __popc(selected & ~kFirst));
  uint8_t* out = indices.data + slots.begin;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (selected >> i & 1) out[place.of(i)++] = static_cast<uint8_t>(index_of(i));
  }
}

}  // namespace hvd_compress
