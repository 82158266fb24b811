// Pieces on the CPU: checks of their contents, and iteration over slots.
#pragma once

#include "../pieces.h"

namespace hvd_compress {

// Checks that pieces ascend within `blocks` blocks and partition their slots, and returns the
// number of these. Then every block and every slot is processed by exactly one thread.
inline int64_t check_pieces(const Piece* pieces, int64_t count, int64_t blocks) {
  int64_t next = 0, slots = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Piece& piece = pieces[i];
    STD_TORCH_CHECK(
        next <= piece.first_block && piece.first_slot == slots && fits(piece, blocks, kMaxSlots),
        "pieces must follow one another within ", blocks, " blocks, got first block ",
        piece.first_block, ", blocks ", piece.blocks, ", first slot ", piece.first_slot, ", slots ",
        piece.slots, " in row ", i);
    next = piece.first_block + piece.blocks;
    slots += piece.slots;
  }
  return slots;
}

// The same for pieces of tensors. Returns the number of slots.
inline int64_t check_pieces(const Piece* pieces, const PieceTensors& tensors, int64_t blocks) {
  int64_t count = tensors.rows.size(), slots = check_pieces(pieces, count, blocks);
  for (int64_t i = 0; i < count; ++i) {
    const PieceTensor& tensor = tensors.rows[i];
    STD_TORCH_CHECK(tensor.entries == 0 || tensor.blocks == pieces[i].blocks, "piece ", i, " has ",
                    pieces[i].blocks, " blocks, but its tensor ", tensor.entries, " entries");
  }
  return slots;
}

inline void check_pieces(const BucketSlots& bucket) {
  int64_t slots = check_pieces(bucket.pieces, bucket.piece_count, bucket.blocks);
  STD_TORCH_CHECK(slots == bucket.slots, "pieces must hold all ", bucket.slots, " slots, got ",
                  slots);
}

// Calls part(row number, first, last) for each row's blocks among the blocks from begin to end.
// `first` and `last` are counted within the row.
template <typename Row, typename Part>
void for_parts(const Row* rows, int64_t count, int64_t begin, int64_t end, const Part& part) {
  int64_t i = find_row(rows, count, begin);
  for (i = i < 0 ? 0 : i; i < count && rows[i].first_block < end; ++i) {
    int64_t first = std::max<int64_t>(begin - rows[i].first_block, 0);
    int64_t last = std::min(end - rows[i].first_block, rows[i].blocks);
    if (first < last) part(i, first, last);
  }
}

// Iterates over blocks and their slots without a division per block: keeps the remainder of
// slot_start.
class SlotIterator {
 public:
  SlotIterator(const Piece& piece, int64_t block, int64_t phase)
      : blocks_(piece.blocks),
        whole_(piece.slots / blocks_),
        part_(piece.slots % blocks_),
        slot_(piece.first_slot),
        rest_(modulo(phase, blocks_)) {
    rest_ += block * piece.slots;
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

constexpr int64_t kSlotsAhead = 128;  // slots; more than the outstanding cache misses of a core

// Calls work(slot, entry) in order for the slots of the blocks first to last of a piece. Every
// slot is a cache miss, so touch(entry) is called kSlotsAhead slots earlier to prefetch it. Blocks
// and entries are counted within the piece.
template <typename Touch, typename Work>
void for_slots(const BucketSlots& bucket, const Piece& piece, int64_t first, int64_t last,
               const Touch& touch, const Work& work) {
  const uint8_t* indices = bucket.indices;
  SlotIterator current(piece, first, bucket.phase), ahead = current;
  int64_t fetched = first;
  for (; first < last; ++first) {
    for (; fetched < last && ahead.slot() < current.slot() + kSlotsAhead; ++fetched) {
      auto [slot, end] = ahead.next();
      for (; slot < end; ++slot) touch(fetched * kBlock + indices[slot]);
    }
    auto [slot, end] = current.next();
    for (; slot < end; ++slot) work(slot, first * kBlock + indices[slot]);
  }
}

}  // namespace hvd_compress
