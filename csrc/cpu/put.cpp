// put on the CPU.
#include "../put.h"

#include <torch/csrc/stable/ops.h>

#include "../put_rim.h"
#include "segments.h"

namespace hvd_compress {
namespace {

constexpr int64_t kGrain = 1024;  // blocks a thread takes at least

struct Grad {
  void* data;
  int64_t entries;
  ScalarType dtype;
  int64_t size;  // of an entry, in bytes
};

// In slot order: of two slots of one entry the later is assigned.
template <typename T, typename P>
void assign(const Put& args, T* grad, int64_t inside, Slots slots, const P* total) {
  for (int64_t slot = slots.begin; slot < slots.end; ++slot) {
    if (args.offsets[slot] < inside) {
      grad[args.offsets[slot]] = static_cast<T>(static_cast<float>(total[slot]) * args.scale);
    }
  }
}

// Likewise, but every residual is read before any is written: nothing is given back twice.
template <typename P>
void give_back(const Put& args, float* residual, Slots slots, const P* total, const P* sent) {
  float values[kBlock];
  for (int64_t slot = slots.begin; slot < slots.end; ++slot) {
    values[slot - slots.begin] = residual[args.offsets[slot]] + static_cast<float>(sent[slot]);
  }
  for (int64_t slot = slots.begin; slot < slots.end; ++slot) {
    if (returns(total[slot], sent[slot])) {
      residual[args.offsets[slot]] = values[slot - slots.begin];
    }
  }
}

template <typename P>
void put_block(const Put& args, const Grad& grad, int64_t segment, int64_t block, Slots slots,
               const P* total, const P* sent) {
  bool lost = false;
  for (int64_t slot = slots.begin; slot < slots.end; ++slot) lost |= !is_finite(total[slot]);
  if (lost) give_back(args, args.residual + block * kBlock, slots, total, sent);
  int64_t first = (block - args.segments[segment].first_block) * kBlock;
  if (grad.entries <= first) return;  // skipped, or padding
  with_type(grad.dtype, [&](auto type) {
    using T = decltype(type);
    assign(args, static_cast<T*>(grad.data) + first, grad.entries - first, slots, total);
  });
}

template <typename P>
void run(const Put& args, const std::vector<Grad>& grads, const P* total, const P* sent) {
  torch::stable::parallel_for(0, args.blocks, kGrain, [&](int64_t begin, int64_t end) {
    for_blocks(
        args.segments, args.segment_count, begin, end, args.phase,
        [&](int64_t segment, int64_t block, Slots slots) {
          const Grad& grad = grads[segment];
          if (grad.entries == 0) return;
          int64_t first = (block - args.segments[segment].first_block) * kBlock;
          const char* memory = static_cast<const char*>(grad.data);
          for (int64_t slot = slots.begin; slot < slots.end; ++slot) {
            __builtin_prefetch(memory + (first + args.offsets[slot]) * grad.size, 1);
          }
        },
        [&](int64_t segment, int64_t block, Slots slots) {
          put_block(args, grads[segment], segment, block, slots, total, sent);
        });
  });
}

void put_cpu(std::vector<Tensor> grads, Tensor residual, Tensor offsets, Tensor segments,
             Tensor total, Tensor sent, int64_t phase, double scale) {
  Put args = checked(grads, residual, offsets, segments, total, sent, phase, scale);
  check_segments(args.segments, args.segment_count, args.blocks, args.slots);
  std::vector<Grad> table;
  for (const Tensor& grad : grads) {
    table.push_back({grad.mutable_data_ptr(), grad.numel(), grad.scalar_type(),
                     static_cast<int64_t>(grad.element_size())});
  }
  if (total.scalar_type() == ScalarType::Float) {
    run(args, table, const_data<float>(total), const_data<float>(sent));
  } else {
    run(args, table, const_data<Half>(total), const_data<Half>(sent));
  }
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CPU, library) {
  library.impl("put", TORCH_BOX(&hvd_compress::put_cpu));
}
