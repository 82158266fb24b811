// lanes_prepare and lanes_follow on CUDA: a warp to a group.
#include "../scales.h"
#include "../scales_rim.h"
#include "moments.h"

namespace hvd_compress {
namespace {

// The group of this warp, if there is one.
__device__ __forceinline__ bool has_group(const Scales& scales, int64_t group) {
  return group < scales.groups.count && scales.groups.within(group, scales.size);
}

__global__ void __launch_bounds__(kThreads) prepare_kernel(const __grid_constant__ Prepare args) {
  int64_t group = warp_id();
  if (!has_group(args.scales, group)) return;
  Sums sums = warp_moments(args.values, args.scales.groups, group);
  if (lane_id() == 0) prepare_group(args, group, sums);
}

// An invalid average becomes NaN after its moments were read: group by group, in one launch.
__global__ void __launch_bounds__(kThreads) follow_kernel(const __grid_constant__ Follow args) {
  int64_t group = warp_id();
  if (!has_group(args.scales, group)) return;
  Sums sums = warp_moments(args.mean, args.scales.groups, group);
  if (lane_id() == 0) follow_group(args, group, sums);
  if (args.rest[0] == 0) return;
  int64_t end = args.scales.groups.edges[group + 1];
  for (int64_t i = args.scales.groups.edges[group] + lane_id(); i < end; i += kLanes) {
    args.mean[i] = bits_as<float>(0x7fc00000u);
  }
}

void lanes_prepare_cuda(Tensor values, Tensor edges, Tensor shared, Tensor kind, Tensor grid,
                        Tensor invalid, Tensor step, Tensor rest, int64_t ranks) {
  Prepare args = checked(values, edges, shared, kind, grid, invalid, step, rest, ranks);
  Launch launch(values);
  prepare_kernel<<<grid_for(args.scales.groups.count), kThreads, 0, launch.stream()>>>(args);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void lanes_follow_cuda(Tensor mean, Tensor edges, Tensor shared, Tensor kind, Tensor rest,
                       Tensor next_shared, Tensor next_kind, int64_t ranks) {
  Follow args = checked(mean, edges, shared, kind, rest, next_shared, next_kind, ranks);
  Launch launch(mean);
  follow_kernel<<<grid_for(args.scales.groups.count), kThreads, 0, launch.stream()>>>(args);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CUDA, library) {
  library.impl("lanes_prepare", TORCH_BOX(&hvd_compress::lanes_prepare_cuda));
  library.impl("lanes_follow", TORCH_BOX(&hvd_compress::lanes_follow_cuda));
}
