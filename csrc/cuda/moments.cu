// moments on CUDA: a warp to a group, a running sum to a lane.
#include "../moments_rim.h"
#include "warp.h"

namespace hvd_compress {
namespace {

static_assert(kSums == kLanes);

__global__ void __launch_bounds__(kThreads) moments_kernel(const __grid_constant__ Moments args) {
  int64_t group = warp_id();
  if (group >= args.groups.count) return;
  int64_t begin = args.groups.edges[group], end = args.groups.edges[group + 1];
  if (begin < 0 || end > args.size) return;  // the host cannot check this

  double square = 0.0, fourth = 0.0;
  float largest = 0.0f;
#pragma unroll 8
  for (int64_t i = begin + lane_id(); i < end; i += kLanes) {
    take_moments(args.values[i], square, fourth, largest);
  }
#pragma unroll
  for (int width = kLanes / 2; width > 0; width /= 2) {
    square += __shfl_down_sync(kAll, square, width);
    fourth += __shfl_down_sync(kAll, fourth, width);
    largest = larger(__shfl_down_sync(kAll, largest, width), largest);
  }
  if (lane_id() == 0) {
    args.out[3 * group] = square;
    args.out[3 * group + 1] = fourth;
    args.out[3 * group + 2] = largest;
  }
}

void moments_cuda(Tensor values, Tensor edges, Tensor out) {
  Moments args = checked(values, edges, out);
  if (args.groups.count == 0) return;
  Launch launch(values);
  moments_kernel<<<grid_for(args.groups.count), kThreads, 0, launch.stream()>>>(args);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CUDA, library) {
  library.impl("moments", TORCH_BOX(&hvd_compress::moments_cuda));
}
