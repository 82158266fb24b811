// The arguments of select, checked: the same on every device.
#pragma once

#include "rim.h"
#include "select.h"

namespace hvd_compress {

// `scored` is the tensor, of whole blocks, that the picks come from.
inline Select checked_select(const Tensor& scored, const Tensor& offsets, int64_t slots,
                             int64_t first_slot, int64_t phase, int64_t run, int64_t ranks,
                             int64_t position, int64_t key, int64_t explore) {
  check_flat(offsets, "offsets", ScalarType::Byte, scored);
  constexpr int64_t kLimit = int64_t{1} << 31;  // of run and ranks: their product fits in 64 bits
  STD_TORCH_CHECK(0 <= slots && slots <= scored.numel(), "slots has to be 0 to ", scored.numel(),
                  ", got ", slots);
  STD_TORCH_CHECK(0 <= first_slot && first_slot < (int64_t{1} << 40),
                  "first_slot has to be 0 to 2**40, got ", first_slot);
  STD_TORCH_CHECK(1 <= run && run < kLimit, "run has to be 1 to 2**31 - 1, got ", run);
  STD_TORCH_CHECK(1 <= ranks && ranks < kLimit, "ranks has to be 1 to 2**31 - 1, got ", ranks);
  STD_TORCH_CHECK(0 <= position && position < ranks, "position has to be 0 to ", ranks - 1,
                  ", got ", position);
  STD_TORCH_CHECK(0 <= key && key <= 0xFFFFFFFF, "key has to be 0 to 2**32 - 1, got ", key);
  STD_TORCH_CHECK(0 <= explore && explore <= int64_t{1} << 32, "explore has to be 0 to 2**32, got ",
                  explore);
  int64_t blocks = scored.numel() / kBlock;
  Select args{data<uint8_t>(offsets),
              blocks,
              slots,
              first_slot,
              slots ? modulo(phase, blocks) : 0,
              run,
              ranks,
              position,
              static_cast<uint32_t>(key),
              explore};
  // Never write outside: this is all that decides where a pick is written.
  STD_TORCH_CHECK(slots == 0 || args.place(blocks) <= offsets.numel(), "offsets has to have ",
                  slots ? args.place(blocks) : 0, " entries for these slots, got ",
                  offsets.numel());
  return args;
}

}  // namespace hvd_compress
