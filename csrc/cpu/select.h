// The picks of one block on the CPU, whose scores lie in the L1 cache.
#pragma once

#include "../select.h"

namespace hvd_compress {

constexpr int kFew = 6;         // up to so many picks, repeated argmax is faster than the search
constexpr int32_t kTaken = -1;  // below every score

HVD_BODY void explore_block(int32_t* scores, int64_t block, uint32_t key) {
  for (int i = 0; i < kBlock; ++i) scores[i] = explore_bits(scores[i], block * kBlock + i, key);
}

// Takes the largest `count` times. Picks come out by score: put each in its place by offset.
HVD_BODY void pick_few(int32_t* scores, int count, uint8_t* picked) {
  for (int k = 0; k < count; ++k) {
    int32_t best = kTaken;
    for (int i = 0; i < kBlock; ++i) best = scores[i] > best ? scores[i] : best;
    int32_t where = kBlock;
    for (int32_t i = 0; i < kBlock; ++i) {
      int32_t here = scores[i] == best ? i : kBlock;
      where = here < where ? here : where;
    }
    scores[where] = kTaken;
    int slot = k;
    for (; slot > 0 && picked[slot - 1] > where; --slot) picked[slot] = picked[slot - 1];
    picked[slot] = static_cast<uint8_t>(where);
  }
}

// Finds, bit by bit, the largest threshold that `count` scores reach; the lowest offsets among
// those equal to it fill up what the larger ones leave.
HVD_BODY void pick_many(const int32_t* scores, int count, uint8_t* picked) {
  int32_t threshold = 0;
  for (int bit = 30; bit >= 0; --bit) {
    int32_t candidate = threshold | (1 << bit);
    int32_t reached = 0;
    for (int i = 0; i < kBlock; ++i) reached += scores[i] >= candidate;
    if (reached >= count) threshold = candidate;
    if (reached == count) break;
  }
  int32_t room = count;
  for (int i = 0; i < kBlock; ++i) room -= scores[i] > threshold;
  uint8_t chosen[kBlock + 1];  // written before it is known whether the entry is chosen
  int filled = 0;
  for (int i = 0; i < kBlock; ++i) {
    int equal = (scores[i] == threshold) & (room > 0);
    chosen[filled] = static_cast<uint8_t>(i);
    filled += (scores[i] > threshold) | equal;
    room -= equal;
  }
  memcpy(picked, chosen, count);
}

// Writes the picks that this rank leads in a block. The scores are used up.
HVD_BODY void pick(const Select& select, int64_t block, int32_t* scores, int count,
                   uint8_t* picked) {
  if (select.explored(block)) explore_block(scores, block, select.key);
  if (count <= kFew) {
    pick_few(scores, count, picked);
  } else {
    pick_many(scores, count, picked);
  }
}

}  // namespace hvd_compress
