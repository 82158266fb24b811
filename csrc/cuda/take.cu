// take on CUDA: one launch for a bucket, a warp to a block.
#include "../take_rim.h"
#include "segments.h"

namespace hvd_compress {
namespace {

__global__ void __launch_bounds__(kThreads) take_kernel(const __grid_constant__ Take args) {
  const Picks& picks = args.picks;
  int64_t block = warp_id();
  if (block >= picks.blocks) return;
  Slots slots = slots_of(picks, picks.segments, picks.segment_count, block);
  for (int64_t slot = slots.range.begin + lane_id(); slot < slots.range.end; slot += kLanes) {
    args.values[slot] = args.residual[block * kBlock + picks.offsets[slot]];
  }
}

void take_cuda(Tensor residual, Tensor offsets, Tensor segments, Tensor values, int64_t phase) {
  Take args = checked(residual, offsets, segments, values, phase);
  if (args.picks.blocks == 0 || args.picks.slots == 0) return;
  Launch launch(residual);
  take_kernel<<<grid_for(args.picks.blocks), kThreads, 0, launch.stream()>>>(args);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CUDA, library) {
  library.impl("take", TORCH_BOX(&hvd_compress::take_cuda));
}
