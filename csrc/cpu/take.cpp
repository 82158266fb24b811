// take on the CPU.
#include "../take.h"

#include <torch/csrc/stable/ops.h>

#include "../take_rim.h"
#include "segments.h"

namespace hvd_compress {
namespace {

constexpr int64_t kGrain = 1024;  // blocks a thread takes at least

// Two slots may hold the same entry, so every value is read before any is written.
template <typename P>
void take_block(const Take& args, int64_t block, Slots slots, P* payload) {
  float* residual = args.residual + block * kBlock;
  float values[kBlock];
  for (int64_t slot = slots.begin; slot < slots.end; ++slot) {
    values[slot - slots.begin] = residual[args.offsets[slot]];
  }
  for (int64_t slot = slots.begin; slot < slots.end; ++slot) {
    float value = values[slot - slots.begin];
    P sent = clip<P>(value, args.limit);
    payload[slot] = sent;
    residual[args.offsets[slot]] = value - static_cast<float>(sent);
    if (args.velocity) args.velocity[block * kBlock + args.offsets[slot]] = 0.0f;
  }
}

template <typename P>
void run(const Take& args, P* payload) {
  if (*args.invalid) {
    for (int64_t slot = 0; slot < args.slots; ++slot) payload[slot] = not_a_number<P>();
    return;
  }
  torch::stable::parallel_for(0, args.blocks, kGrain, [&](int64_t begin, int64_t end) {
    for_blocks(
        args.segments, args.segment_count, begin, end, args.phase,
        [&](int64_t, int64_t block, Slots slots) {
          for (int64_t slot = slots.begin; slot < slots.end; ++slot) {
            int64_t entry = block * kBlock + args.offsets[slot];
            __builtin_prefetch(args.residual + entry, 1);
            if (args.velocity) __builtin_prefetch(args.velocity + entry, 1);
          }
        },
        [&](int64_t, int64_t block, Slots slots) { take_block(args, block, slots, payload); });
  });
}

void take_cpu(Tensor residual, std::optional<Tensor> velocity, Tensor offsets, Tensor segments,
              Tensor invalid, Tensor payload, int64_t phase, double limit) {
  Take args = checked(residual, velocity, offsets, segments, invalid, payload, phase, limit);
  check_segments(args.segments, args.segment_count, args.blocks, args.slots);
  if (payload.scalar_type() == ScalarType::Float) {
    run(args, data<float>(payload));
  } else {
    run(args, data<Half>(payload));
  }
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CPU, library) {
  library.impl("take", TORCH_BOX(&hvd_compress::take_cpu));
}
