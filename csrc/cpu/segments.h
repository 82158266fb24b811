// Segments on the CPU: checks of their contents, and iteration over slots.
#pragma once

#include "../segments.h"

namespace hvd_compress {

// Checks that segments ascend within the residual and partition the slots. Then all accesses are
// within the tensors, and every slot is processed by exactly one thread.
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

// Calls part(segment number, first, last) for each segment's blocks among the bucket's blocks from
// begin to end. `first` and `last` are counted within the segment.
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

// Iterates over blocks and their slots without a division per block: keeps the remainder of
// slot_start.
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

  int64_t slot() const { return slot_; }  // the first slot of the block

  // Returns the slots of the block, and advances to the next block.
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

constexpr int64_t kAhead = 128;  // slots; more than the outstanding cache misses of a core

// Calls work(slot, entry) in order for the slots of the blocks first to last of a segment. Every
// slot is a cache miss, so touch(entry) is called kAhead slots earlier to prefetch it. Blocks and
// entries are counted within the segment.
template <typename Touch, typename Work>
void for_slots(const BucketSlots& bucket, const Segment& segment, int64_t first, int64_t last,
               const Touch& touch, const Work& work) {
  const uint8_t* indices = bucket.indices;
  SlotIterator current(segment, first, bucket.phase), ahead = current;
  int64_t fetched = first;
  for (; first < last; ++first) {
    for (; fetched < last && ahead.slot() < current.slot() + kAhead; ++fetched) {
      auto [slot, end] = ahead.next();
      for (; slot < end; ++slot) touch(fetched * kBlock + indices[slot]);
    }
    auto [slot, end] = current.next();
    for (; slot < end; ++slot) work(slot, first * kBlock + indices[slot]);
  }
}

}  // namespace hvd_compress
