// The picks of one block on CUDA, whose scores lie in a warp's registers.
#pragma once

#include "../select.h"
#include "warp.h"

namespace hvd_compress {

constexpr int kFew = 8;         // up to so many picks, repeated argmax is faster than the search
constexpr int32_t kTaken = -1;  // below every score

struct Led {
  int64_t place;
  int count;
};

// What this rank leads in a block: how many slots, and where in `offsets` they begin.
__device__ __forceinline__ Led led(const Select& select, int64_t block) {
  // 64-bit divisions are slow here: even lanes find this block's place, odd ones the next one's.
  int64_t edge = select.place(block + lane_id() % 2);
  int64_t place = __shfl_sync(kAll, edge, 0);
  return {place, static_cast<int>(__shfl_sync(kAll, edge, 1) - place)};
}

// Both return, as bits, which of this lane's entries are picked. The lanes hold the block in order
// of offset, so "the lowest offset" is the lowest lane and then the lowest bit.

// Takes the largest `count` times.
__device__ __forceinline__ unsigned pick_few(int32_t (&scores)[kEach], int count) {
  unsigned picked = 0;
  for (int k = 0; k < count; ++k) {
    int32_t best = kTaken;
#pragma unroll
    for (int i = 0; i < kEach; ++i) best = max(best, scores[i]);
    int32_t top = largest_of_all(best);
    bool mine = lane_id() == __ffs(__ballot_sync(kAll, best == top)) - 1;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (mine && scores[i] == top) {
        scores[i] = kTaken;
        picked |= 1u << i;
        mine = false;
      }
    }
  }
  return picked;
}

// Finds, bit by bit, the largest threshold that `count` scores reach; the lowest offsets among
// those equal to it fill up what the larger ones leave.
__device__ __forceinline__ unsigned pick_many(const int32_t (&scores)[kEach], int count) {
  int32_t threshold = 0;
  for (int bit = 30; bit >= 0; --bit) {
    int32_t candidate = threshold | (1 << bit);
    int reached = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) reached += scores[i] >= candidate;
    reached = sum_of_all(reached);
    if (reached >= count) threshold = candidate;
    if (reached == count) break;
  }
  int larger = 0, equal = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    larger += scores[i] > threshold;
    equal += scores[i] == threshold;
  }
  int room = count - sum_of_all(larger) - sum_before(equal);
  unsigned picked = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (scores[i] > threshold || (scores[i] == threshold && room-- > 0)) picked |= 1u << i;
  }
  return picked;
}

// Writes the picks that this rank leads in a block. The scores are used up.
__device__ __forceinline__ void pick(const Select& select, int64_t block, int32_t (&scores)[kEach],
                                     Led led) {
  int64_t first = block * kBlock + lane_id() * kEach;
  if (select.explored(block)) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) scores[i] = explore_bits(scores[i], first + i, select.key);
  }
  unsigned picked = led.count <= kFew ? pick_few(scores, led.count) : pick_many(scores, led.count);
  uint8_t* out = select.offsets + led.place + sum_before(__popc(picked));
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (picked >> i & 1) *out++ = static_cast<uint8_t>(lane_id() * kEach + i);
  }
}

}  // namespace hvd_compress
