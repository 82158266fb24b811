// The selection in one block on the CPU. Its scores are in the L1 cache.
#pragma once

#include "../pack.h"
#include "../select.h"
#include "pieces.h"

namespace hvd_compress {

constexpr int kFew = 2;            // up to this count, repeated argmax is fastest
constexpr int kSome = 16;          // up to this count, candidates are faster than the search
constexpr int kCandidates = 64;    // at most
constexpr int32_t kSelected = -1;  // below every score and threshold

HVD_BODY void explore_block(int32_t* scores, int64_t block, uint32_t key) {
  for (int i = 0; i < kBlock; ++i) scores[i] = explore_bits(scores[i], block * kBlock + i, key);
}

// The number of scores that reach a threshold.
HVD_BODY int reaching(const int32_t* scores, int32_t threshold) {
  int32_t reached = 0;
  for (int i = 0; i < kBlock; ++i) reached += scores[i] >= threshold;
  return reached;
}

// The `count`-th largest of the groups' largest scores: at least `count` scores reach it, and few
// more.
template <int kGroups>
HVD_BODY int32_t reached_by(const int32_t* scores, int count) {
  alignas(64) int32_t best[kGroups] = {}, larger[kGroups] = {};
  for (int row = 0; row < kBlock; row += kGroups) {
    for (int i = 0; i < kGroups; ++i) {
      best[i] = scores[row + i] > best[i] ? scores[row + i] : best[i];
    }
  }
  for (int other = 0; other < kGroups; ++other) {
    for (int i = 0; i < kGroups; ++i) larger[i] += best[other] > best[i];
  }
  int32_t bound = INT32_MAX;
  for (int i = 0; i < kGroups; ++i) {
    int32_t smaller = (count - 1 - larger[i]) >> 31;  // -1 if it is not among the largest
    int32_t mine = best[i] | (smaller & INT32_MAX);   // without a branch
    bound = mine < bound ? mine : bound;
  }
  return bound;
}

// For every byte, the positions of its set bits, ascending, one byte each.
struct BitPositions {
  uint64_t of[256] = {};

  constexpr BitPositions() {
    for (int set = 0; set < 256; ++set) {
      for (int bit = 8; bit-- > 0;) {
        if (set >> bit & 1) of[set] = of[set] << 8 | static_cast<uint64_t>(bit);
      }
    }
  }
};
inline constexpr BitPositions kBitPositions;

// Writes the indices of the scores that reach a threshold, one word at a time: up to one word
// beyond the last index is overwritten. Returns their number.
HVD_BODY int list_reaching(const int32_t* scores, int32_t threshold, uint8_t* listed) {
  constexpr uint64_t kOnes = 0x0101010101010101, kCollect = 0x0102040810204080;
  alignas(64) uint8_t reached[kBlock];
  for (int i = 0; i < kBlock; ++i) reached[i] = scores[i] >= threshold;
  int filled = 0;
  for (int i = 0; i < kBlock; i += 8) {
    uint64_t flags = load_word(reached + i);
    uint64_t set = (flags * kCollect) >> 56;  // the product's top byte has one bit per flag
    uint64_t indices = kBitPositions.of[set] + static_cast<uint64_t>(i) * kOnes;
    memcpy(listed + filled, &indices, sizeof(indices));
    filled += static_cast<int>((flags * kOnes) >> 56);
  }
  return filled;
}

// Four numbers in a register, with any instruction set. GCC would keep the sums of the loop below
// in memory.
using Four = int32_t __attribute__((vector_size(16)));

// Of `size` listed indices, keeps those whose scores are among the `count` largest. Returns their
// number, which is above `count` if scores are equal.
HVD_BODY int keep_largest(const int32_t* scores, uint8_t* listed, int size, int count) {
  int32_t candidates[kCandidates], larger[kCandidates];
  for (int i = 0; i < size; ++i) candidates[i] = scores[listed[i]];
  for (int first = 0; first < size; first += 4) {  // beyond the last one, any numbers
    Four mine, sum = {};
    memcpy(&mine, candidates + first, sizeof(mine));
    for (int other = 0; other < size; ++other) sum -= candidates[other] > mine;
    memcpy(larger + first, &sum, sizeof(sum));
  }
  int kept = 0;
  for (int i = 0; i < size; ++i) {
    listed[kept] = listed[i];
    kept += larger[i] < count;
  }
  return kept;
}

// Lists the largest score `count` times, and keeps the indices sorted.
HVD_BODY void list_few(int32_t* scores, int count, uint8_t* listed) {
  for (int k = 0; k < count; ++k) {
    int32_t best = kSelected;
    for (int i = 0; i < kBlock; ++i) best = scores[i] > best ? scores[i] : best;
    int32_t where = kBlock;
    for (int32_t i = 0; i < kBlock; ++i) {
      int32_t here = scores[i] == best ? i : kBlock;
      where = here < where ? here : where;
    }
    scores[where] = kSelected;
    int slot = k;
    for (; slot > 0 && listed[slot - 1] > where; --slot) listed[slot] = listed[slot - 1];
    listed[slot] = static_cast<uint8_t>(where);
  }
}

// Lists the `count` largest scores by a binary search for a threshold that so many reach. If there
// is none, the lowest indices of the scores equal to the threshold are listed.
HVD_BODY void list_largest(int32_t* scores, int count, uint8_t* listed) {
  int32_t low = 0, high = 0;
  for (int i = 0; i < kBlock; ++i) high = scores[i] > high ? scores[i] : high;
  int reached = 0;
  while (low < high && reached != count) {
    int32_t middle = low + (high - low + 1) / 2;
    reached = reaching(scores, middle);
    if (reached >= count) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  if (reached != count) reached = reaching(scores, low);
  for (int i = kBlock - 1; reached > count; --i) {
    bool equal = scores[i] == low;
    scores[i] = equal ? kSelected : scores[i];
    reached -= equal;
  }
  list_reaching(scores, low, listed);
}

// Checks that every tensor has its piece's blocks, and that there is room for all indices.
inline void check_selection(const Draw& draw, const Piece* pieces, const PieceTensors& tensors,
                            int64_t blocks, const Indices& indices) {
  int64_t slots = check_pieces(pieces, tensors, blocks);
  int64_t room = slots_before(slots, draw.run, draw.ranks, draw.position);
  STD_TORCH_CHECK(room <= indices.count, "indices must have ", room,
                  " entries for these slots, got ", indices.count);
}

// Writes the indices that this rank selects in a block. Modifies the scores.
HVD_BODY void select_block(const Select& select, int64_t block, int32_t* scores, int count,
                           uint8_t* selected) {
  if (select.explored(block)) explore_block(scores, block, select.key);
  if (count <= kFew) return list_few(scores, count, selected);
  uint8_t listed[kBlock + sizeof(uint64_t)];
  int reached = kBlock + 1;  // nothing is listed
  if (count <= kSome) {
    int32_t bound =
        count <= kSome / 4 ? reached_by<16>(scores, count) : reached_by<32>(scores, count);
    reached = list_reaching(scores, bound, listed);
    if (count < reached && reached <= kCandidates) {
      reached = keep_largest(scores, listed, reached, count);
    }
  }
  if (reached > count) list_largest(scores, count, listed);
  memcpy(selected, listed, count);
}

}  // namespace hvd_compress
