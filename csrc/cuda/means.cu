// means_send and means_keep on CUDA: a thread to a block's mean.
#include "../means_rim.h"
#include "warp.h"

namespace hvd_compress {
namespace {

__device__ __forceinline__ int64_t thread_id() {
  return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

template <bool kVelocity>
__global__ void __launch_bounds__(kThreads) send_kernel(const __grid_constant__ MeansSend args) {
  int64_t i = thread_id();
  if (i >= args.blocks) return;
  Entry entry = accumulate<kVelocity>(args.fresh[i], args.held[i],
                                      kVelocity ? args.velocity[i] : 0.0f, args.momentum);
  args.held[i] = args.out[i] = entry.residual;
  if (kVelocity) args.velocity[i] = entry.velocity;
  args.fresh[i] = 0.0f;
  if (!entry.finite) atomicOr(args.invalid, 1);
}

__global__ void __launch_bounds__(kThreads) keep_kernel(const __grid_constant__ MeansKeep args) {
  int64_t i = thread_id();
  if (i < args.blocks && is_finite(args.mean[i])) args.held[i] = args.lost[i];
}

void means_send_cuda(Tensor fresh, Tensor held, std::optional<Tensor> velocity, Tensor out,
                     Tensor invalid, double momentum) {
  MeansSend args = checked(fresh, held, velocity, out, invalid, momentum);
  if (args.blocks == 0) return;
  Launch launch(held);
  auto kernel = args.velocity ? send_kernel<true> : send_kernel<false>;
  kernel<<<shares(args.blocks, kThreads), kThreads, 0, launch.stream()>>>(args);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void means_keep_cuda(Tensor mean, Tensor lost, Tensor held) {
  MeansKeep args = checked(mean, lost, held);
  if (args.blocks == 0) return;
  Launch launch(held);
  keep_kernel<<<shares(args.blocks, kThreads), kThreads, 0, launch.stream()>>>(args);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CUDA, library) {
  library.impl("means_send", TORCH_BOX(&hvd_compress::means_send_cuda));
  library.impl("means_keep", TORCH_BOX(&hvd_compress::means_keep_cuda));
}
