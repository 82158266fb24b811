// lanes_prepare and lanes_update on CUDA: one warp per group.
#include "../scales.h"
#include "moments.h"

namespace hvd_compress {
namespace {

// Whether the group exists and is within the values.
__device__ __forceinline__ bool has_group(const Scales& scales, int64_t group) {
  return group < scales.groups.count && scales.groups.within(group, scales.size);
}

__global__ void __launch_bounds__(kThreads)
    prepare_kernel(const __grid_constant__ LanesPrepare args) {
  int64_t group = warp_id();
  if (!has_group(args.scales, group)) return;
  Sums sums = warp_moments(args.values, args.scales.groups, group);
  if (lane_id() == 0) prepare_group(args, group, sums);
}

// Sets the average of a group to NaN, if a rank is invalid, after reading its moments.
__global__ void __launch_bounds__(kThreads)
    update_kernel(const __grid_constant__ LanesUpdate args) {
  int64_t group = warp_id();
  if (!has_group(args.scales, group)) return;
  Sums sums = warp_moments(args.mean, args.scales.groups, group);
  if (lane_id() == 0) update_group(args, group, sums);
  if (args.header[0] == 0) return;
  int64_t end = args.scales.groups.edges[group + 1];
  for (int64_t i = args.scales.groups.edges[group] + lane_id(); i < end; i += kLanes) {
    args.mean[i] = bits_as<float>(0x7fc00000u);
  }
}

void lanes_prepare_cuda(Tensor values, Tensor edges, Tensor shared_scale, Tensor kind, Tensor grid,
                        Tensor invalid, Tensor step, Tensor header, int64_t ranks) {
  LanesPrepare args =
      checked(values, edges, shared_scale, kind, grid, invalid, step, header, ranks);
  Launch launch(values);
  launch.run(grid_for(args.scales.groups.count), prepare_kernel, args);
}

void lanes_update_cuda(Tensor mean, Tensor edges, Tensor shared_scale, Tensor kind, Tensor header,
                       Tensor next_scale, Tensor next_kind, int64_t ranks) {
  LanesUpdate args = checked(mean, edges, shared_scale, kind, header, next_scale, next_kind, ranks);
  Launch launch(mean);
  launch.run(grid_for(args.scales.groups.count), update_kernel, args);
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, HVD_CUDA_KEY, library) {
  library.impl("lanes_prepare", TORCH_BOX(&hvd_compress::lanes_prepare_cuda));
  library.impl("lanes_update", TORCH_BOX(&hvd_compress::lanes_update_cuda));
}
