// What only the CPU can do with segments: check them, and walk their slots.
#pragma once

#include "../segments.h"

namespace hvd_compress {

// Ascending inside the residual, and dividing up all slots: after this no index can leave its
// tensor, no slot is left out and none is two threads' at once.
inline void check_segments(const BucketSlots& bucket) {
  int64_t next = 0, slot = 0;
  for (int64_t i = 0; i < bucket.segment_count; ++i) {
    const Segment& s = bucket.segments[i];
    STD_TORCH_CHECK(
        next <= s.first_block && s.first_slot == slot && fits(s, bucket.blocks, bucket.slots),
        "segments must follow one another within ", bucket.blocks, " blocks and ", bucket.slots,
        " slots, got first block ", s.first_block, ", blocks ", s.blocks, ", first slot ",
        s.first_slot, ", slots ", s.slots, " in row ", i);
    next = s.first_block + s.blocks;
    slot += s.slots;
  }
  STD_TORCH_CHECK(slot == bucket.slots, "segments must hold all ", bucket.slots, " slots, got ",
                  slot);
}

// Calls part(segment's number, first block, last) for what each segment has of the bucket's blocks
// from begin to end. The part's blocks are counted within the segment.
template <typename Part>
void for_parts(const BucketSlots& bucket, int64_t begin, int64_t end, const Part& part) {
  int64_t i = find_segment(bucket.segments, bucket.segment_count, begin);
  for (i = i < 0 ? 0 : i; i < bucket.segment_count; ++i) {
    const Segment& segment = bucket.segments[i];
    int64_t first = std::max<int64_t>(begin - segment.first_block, 0);
    int64_t last = std::min(end - segment.first_block, segment.blocks);
    if (last <= 0) break;
    if (first < last) part(i, first, last);
  }
}

// The slots of one block after the other, without a division for each: what slot_start cuts off is
// carried along.
class SlotIterator {
 public:
  SlotIterator(const Segment& segment, int64_t block, int64_t phase)
      : blocks_(segment.blocks),
        whole_(segment.slots / blocks_),
        part_(segment.slots % blocks_),
        slot_(segment.first_slot),
        rest_(modulo(phase, blocks_)) {
    rest_ += block * segment.slots;
    slot_ += rest_ / blocks_;
    rest_ %= blocks_;
  }

  int64_t slot() const { return slot_; }  // the block's first

  // The block's slots, and on to the next block.
  SlotRange next() {
    int64_t begin = slot_;
    rest_ += part_;
    bool carry = rest_ >= blocks_;
    rest_ -= carry ? blocks_ : 0;
    slot_ += whole_ + carry;
    return {begin, slot_};
  }

 private:
  int64_t blocks_, whole_, part_, slot_, rest_;
};

constexpr int64_t kAhead = 128;  // slots, more than a core can have misses at a time

// Calls work(slot, entry) for the slots of a part of a segment, in order. Slots lie far apart and
// every one is a cache miss, so touch(entry) is called kAhead slots earlier, by a second walk: then
// the misses overlap instead of following one another. Blocks and entries are counted within the
// segment.
template <typename Touch, typename Work>
void for_slots(const BucketSlots& bucket, const Segment& segment, int64_t first, int64_t last,
               const Touch& touch, const Work& work) {
  const uint8_t* indices = bucket.indices;
  SlotIterator walk(segment, first, bucket.phase), ahead = walk;
  int64_t fetched = first;
  for (; first < last; ++first) {
    for (; fetched < last && ahead.slot() < walk.slot() + kAhead; ++fetched) {
      auto [slot, end] = ahead.next();
      for (; slot < end; ++slot) touch(fetched * kBlock + indices[slot]);
    }
    auto [slot, end] = walk.next();
    for (; slot < end; ++slot) work(slot, first * kBlock + indices[slot]);
  }
}

}  // namespace hvd_compress
