// gather on CUDA: one launch per bucket, one warp per block.
#include "../gather.h"
#include "pieces.h"

namespace hvd_compress {
namespace {

__global__ void __launch_bounds__(kThreads) gather_kernel(const __grid_constant__ Gather args) {
  const BucketSlots& bucket = args.bucket;
  int64_t block = warp_id();
  if (block >= bucket.blocks) return;
  BlockSlots slots = slots_of(bucket, block);
  for (int64_t slot = slots.range.begin + lane_id(); slot < slots.range.end; slot += kLanes) {
    args.values[slot] = args.residual[block * kBlock + bucket.indices[slot]];
  }
}

void gather_cuda(Tensor residual, Tensor indices, Tensor pieces, Tensor values, int64_t phase) {
  Gather args = checked(residual, indices, pieces, values, phase);
  if (args.bucket.blocks == 0 || args.bucket.slots == 0) return;
  Launch launch(residual);
  launch.run(grid_for(args.bucket.blocks), gather_kernel, args);
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, HVD_CUDA_KEY, library) {
  library.impl("gather", TORCH_BOX(&hvd_compress::gather_cuda));
}
