// What only the CPU can do with segments: check them, and walk their slots.
#pragma once

#include "../rim.h"

namespace hvd_compress {

// Ascending inside the residual, and dividing up all slots: after this no index can leave its
// tensor, no slot is left out and none is two threads' at once.
inline void check_segments(const Picks& picks) {
  int64_t next = 0, slot = 0;
  for (int64_t i = 0; i < picks.segment_count; ++i) {
    const Segment& s = picks.segments[i];
    STD_TORCH_CHECK(
        next <= s.first_block && s.first_slot == slot && fits(s, picks.blocks, picks.slots),
        "segments have to follow one another within ", picks.blocks, " blocks and ", picks.slots,
        " slots, got first block ", s.first_block, ", blocks ", s.blocks, ", first slot ",
        s.first_slot, ", slots ", s.slots, " in row ", i);
    next = s.first_block + s.blocks;
    slot += s.slots;
  }
  STD_TORCH_CHECK(slot == picks.slots, "segments have to hold all ", picks.slots, " slots, got ",
                  slot);
}

// Calls part(segment's number, first block, last) for what each segment has of the bucket's blocks
// from begin to end. The part's blocks are counted within the segment.
template <typename Part>
void for_parts(const Picks& picks, int64_t begin, int64_t end, const Part& part) {
  int64_t i = find_segment(picks.segments, picks.segment_count, begin);
  for (i = i < 0 ? 0 : i; i < picks.segment_count; ++i) {
    const Segment& segment = picks.segments[i];
    int64_t first = std::max<int64_t>(begin - segment.first_block, 0);
    int64_t last = std::min(end - segment.first_block, segment.blocks);
    if (last <= 0) break;
    if (first < last) part(i, first, last);
  }
}

// The slots of one block after the other, without a division for each: what slot_start cuts off is
// carried along.
class Walk {
 public:
  Walk(const Segment& segment, int64_t block, int64_t phase)
      : blocks_(segment.blocks),
        whole_(segment.slots / blocks_),
        part_(segment.slots % blocks_),
        slot_(segment.first_slot),
        rest_(modulo(phase, blocks_)) {
    rest_ += block * segment.slots;
    slot_ += rest_ / blocks_;
    rest_ %= blocks_;
  }

  int64_t slot() const { return slot_; }       // the block's first
  int64_t most() const { return whole_ + 1; }  // no block has more, and none less than whole_

  void next() {
    rest_ += part_;
    bool carry = rest_ >= blocks_;
    rest_ -= carry ? blocks_ : 0;
    slot_ += whole_ + carry;
  }

 private:
  int64_t blocks_, whole_, part_, slot_, rest_;
};

constexpr int64_t kGroup = 1024;  // slots, whose places stay in the L1 cache
constexpr int64_t kAhead = 128;   // slots, more than a core can have misses at a time

// Calls work(slot, entry) for the slots of a part of a segment, in order; entries are counted
// within the segment. Slots lie far apart and every one is a cache miss, so touch(entry) is called
// kAhead slots earlier, to prefetch: then the misses overlap instead of following one another.
template <typename Touch, typename Work>
void for_slots(const Picks& picks, const Segment& segment, int64_t first, int64_t last,
               const Touch& touch, const Work& work) {
  int64_t entries[kGroup + kBlock];
  Walk walk(segment, first, picks.phase);
  int64_t end = segment.first_slot + segment.slots;
  while (first < last) {
    int64_t begin = walk.slot(), count = 0;
    for (; first < last && count < kGroup; ++first) {
      // Always as many, for the branch predictor: the next block overwrites one too many.
      int64_t most = std::min(walk.most(), end - walk.slot());
      for (int64_t k = 0; k < most; ++k) {
        entries[count + k] = first * kBlock + picks.offsets[walk.slot() + k];
      }
      walk.next();
      count = walk.slot() - begin;
    }
    int64_t ahead = std::min(kAhead, count), k = 0;
    for (; k < ahead; ++k) touch(entries[k]);
    for (; k < count; ++k) {
      touch(entries[k]);
      work(begin + k - ahead, entries[k - ahead]);
    }
    for (k -= ahead; k < count; ++k) work(begin + k, entries[k]);
  }
}

}  // namespace hvd_compress
