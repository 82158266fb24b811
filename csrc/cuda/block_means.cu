// block_means_send and block_means_keep on CUDA: one thread per block.
#include "../block_means.h"
#include "warp.h"

namespace hvd_compress {
namespace {

__device__ __forceinline__ int64_t thread_id() {
  return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

template <bool kVelocity>
__global__ void __launch_bounds__(kThreads)
    send_kernel(const __grid_constant__ BlockMeansSend args) {
  int64_t i = thread_id();
  if (i >= args.blocks) return;
  Entry entry = accumulate<kVelocity>(args.fresh[i], args.unsent[i],
                                      kVelocity ? args.velocity[i] : 0.0f, args.momentum);
  args.unsent[i] = args.out[i] = entry.residual;
  if (kVelocity) args.velocity[i] = entry.velocity;
  args.fresh[i] = 0.0f;
  if (!entry.usable) atomicOr(args.invalid, 1);
}

__global__ void __launch_bounds__(kThreads)
    keep_kernel(const __grid_constant__ BlockMeansKeep args) {
  int64_t i = thread_id();
  if (i < args.blocks && is_finite(args.mean[i])) args.unsent[i] = args.error[i];
}

void block_means_send_cuda(Tensor fresh, Tensor unsent, std::optional<Tensor> velocity, Tensor out,
                           Tensor invalid, double momentum) {
  BlockMeansSend args = checked(fresh, unsent, velocity, out, invalid, momentum);
  if (args.blocks == 0) return;
  Launch launch(unsent);
  auto kernel = args.velocity ? send_kernel<true> : send_kernel<false>;
  launch.run(ceil_div(args.blocks, kThreads), kernel, args);
}

void block_means_keep_cuda(Tensor mean, Tensor quantization_error, Tensor unsent) {
  BlockMeansKeep args = checked(mean, quantization_error, unsent);
  if (args.blocks == 0) return;
  Launch launch(unsent);
  launch.run(ceil_div(args.blocks, kThreads), keep_kernel, args);
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, HVD_CUDA_KEY, library) {
  library.impl("block_means_send", TORCH_BOX(&hvd_compress::block_means_send_cuda));
  library.impl("block_means_keep", TORCH_BOX(&hvd_compress::block_means_keep_cuda));
}
