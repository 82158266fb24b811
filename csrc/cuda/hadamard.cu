// hadamard on CUDA: one warp per block.
#include "../hadamard.h"
#include "hadamard.h"

namespace hvd_compress {
namespace {

__global__ void __launch_bounds__(kThreads)
    hadamard_kernel(const __grid_constant__ Hadamard args, bool aligned) {
  int64_t block = warp_id();
  if (block >= args.blocks) return;
  float values[kPerLane];
  load(values, args.values + block * kBlock, kBlock, aligned);
  hadamard_block(values);
  store(args.values + block * kBlock, values, kBlock, aligned);
}

void hadamard_cuda(Tensor values) {
  Hadamard args = checked(values);
  if (args.blocks == 0) return;
  Launch launch(values);
  launch.run(grid_for(args.blocks), hadamard_kernel, args, on_16_bytes(args.values));
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, HVD_CUDA_KEY, library) {
  library.impl("hadamard", TORCH_BOX(&hvd_compress::hadamard_cuda));
}
