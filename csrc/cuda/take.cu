// take on CUDA: one launch for a bucket, a warp to a block.
#include "../take_rim.h"
#include "warp.h"

namespace hvd_compress {
namespace {

template <typename P>
__global__ void __launch_bounds__(kThreads)
    take_kernel(const __grid_constant__ Take args, P* __restrict__ payload) {
  int64_t block = warp_id();
  if (block >= args.blocks) return;
  int64_t index = find_segment(args.segments, args.segment_count, block);
  if (index < 0) return;
  Segment segment = args.segments[index];
  if (!fits(segment, args.blocks, args.slots)) return;  // the host cannot check this
  if (block >= segment.first_block + segment.blocks) return;
  Slots slots = slots_of(segment, block, args.phase);
  bool invalid = *args.invalid != 0;

  // Two slots may hold the same entry, so every value is read before any is written.
  int64_t base = block * kBlock;
  float values[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    int64_t slot = slots.begin + i * kLanes + lane_id();
    values[i] = slot < slots.end ? args.residual[base + args.offsets[slot]] : 0.0f;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    int64_t slot = slots.begin + i * kLanes + lane_id();
    if (slot >= slots.end) continue;
    if (invalid) {
      payload[slot] = not_a_number<P>();
      continue;
    }
    int64_t entry = base + args.offsets[slot];
    P sent = clip<P>(values[i], args.limit);
    payload[slot] = sent;
    args.residual[entry] = values[i] - static_cast<float>(sent);
    if (args.velocity) args.velocity[entry] = 0.0f;
  }
}

void take_cuda(Tensor residual, std::optional<Tensor> velocity, Tensor offsets, Tensor segments,
               Tensor invalid, Tensor payload, int64_t phase, double limit) {
  Take args = checked(residual, velocity, offsets, segments, invalid, payload, phase, limit);
  if (args.blocks == 0 || args.slots == 0) return;
  Launch launch(residual);
  unsigned grid = grid_for(args.blocks);
  if (payload.scalar_type() == ScalarType::Float) {
    take_kernel<<<grid, kThreads, 0, launch.stream()>>>(args, data<float>(payload));
  } else {
    take_kernel<<<grid, kThreads, 0, launch.stream()>>>(args, data<Half>(payload));
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CUDA, library) {
  library.impl("take", TORCH_BOX(&hvd_compress::take_cuda));
}
