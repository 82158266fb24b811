// The arguments of accumulate_select, checked: the same on every device.
#pragma once

#include "accumulate_select.h"
#include "rim.h"

namespace hvd_compress {

inline AccumulateSelect checked(const Tensor& grad, const Tensor& residual, const Tensor& weight,
                                const std::optional<Tensor>& velocity, const Tensor& floor,
                                const Tensor& offsets, const Tensor& invalid, double scale,
                                double momentum, int64_t slots, int64_t first_slot, int64_t phase,
                                int64_t run, int64_t ranks, int64_t position, int64_t key,
                                int64_t explore) {
  int64_t blocks = check_residual(residual, velocity);
  check_dense(grad, "grad", residual);
  check_dense(weight, "weight", residual);
  check_dtype(weight, "weight", grad.scalar_type());
  check_numel(weight, "weight", grad.numel());
  STD_TORCH_CHECK(grad.numel() <= residual.numel(), "grad has to have at most ", residual.numel(),
                  " entries, those of the residual, got ", grad.numel());
  check_flat(floor, "floor", ScalarType::Float, residual);
  check_numel(floor, "floor", 1);
  check_flat(offsets, "offsets", ScalarType::Byte, residual);
  check_flat(invalid, "invalid", ScalarType::Int, residual);
  check_numel(invalid, "invalid", 1);
  constexpr int64_t kLimit = int64_t{1} << 31;  // of run and ranks: their product fits in 64 bits
  STD_TORCH_CHECK(0 <= slots && slots <= residual.numel(), "slots has to be 0 to ",
                  residual.numel(), ", got ", slots);
  STD_TORCH_CHECK(0 <= first_slot && first_slot < (int64_t{1} << 40),
                  "first_slot has to be 0 to 2**40, got ", first_slot);
  STD_TORCH_CHECK(1 <= run && run < kLimit, "run has to be 1 to 2**31 - 1, got ", run);
  STD_TORCH_CHECK(1 <= ranks && ranks < kLimit, "ranks has to be 1 to 2**31 - 1, got ", ranks);
  STD_TORCH_CHECK(0 <= position && position < ranks, "position has to be 0 to ", ranks - 1,
                  ", got ", position);
  STD_TORCH_CHECK(0 <= key && key <= 0xFFFFFFFF, "key has to be 0 to 2**32 - 1, got ", key);
  STD_TORCH_CHECK(0 <= explore && explore <= int64_t{1} << 32, "explore has to be 0 to 2**32, got ",
                  explore);
  AccumulateSelect args{data<float>(residual),
                        velocity_data(velocity),
                        const_data<float>(floor),
                        data<uint8_t>(offsets),
                        data<int32_t>(invalid),
                        grad.numel(),
                        blocks,
                        static_cast<float>(scale),
                        static_cast<float>(momentum),
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
