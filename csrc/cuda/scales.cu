// lanes_prepare and lanes_update on CUDA.
#include "../scales.h"
#include "moments.h"

namespace hvd_compress {
namespace {

// Whether the group exists and is within the values.
__device__ __forceinline__ bool has_group(const Scales& scales, int64_t group) {
  return group < scales.groups.count && scales.groups.within(group, scales.size);
}

__global__ void __launch_bounds__(kThreads)
    prepare_kernel(const __grid_constant__ LanesPrepare args, const Sums* __restrict__ parts) {
  int64_t group = warp_id();
  if (!has_group(args.scales, group)) return;
  Sums sums = group_moments(args.scales.groups, parts, group);
  if (lane_id() == 0) prepare_group(args, group, sums);
}

// One warp per part; the first of each group updates its scale. If a rank is invalid, the average
// is set to NaN: its moments were read by an earlier kernel.
__global__ void __launch_bounds__(kThreads)
    update_kernel(const __grid_constant__ LanesUpdate args, const Sums* __restrict__ parts) {
  const Scales& scales = args.scales;
  int64_t number = warp_id();
  if (number >= Parts{scales.groups}.limit(scales.size)) return;
  int64_t group = group_of_part(scales.groups, number, scales.size);
  Part part(scales.groups, group, number, scales.size);
  if (part.group < scales.groups.count && part.number == 0) {
    Sums sums = group_moments(scales.groups, parts, part.group);
    if (lane_id() == 0) update_group(args, part.group, sums);
  }
  if (args.header[0] == 0) return;
  for (int64_t i = part.begin + lane_id(); i < part.end; i += kLanes) {
    args.mean[i] = bits_as<float>(0x7fc00000u);
  }
}

void lanes_prepare_cuda(Tensor values, Tensor edges, Tensor shared_scale, Tensor kind, Tensor grid,
                        Tensor invalid, Tensor step, Tensor header, int64_t ranks) {
  LanesPrepare args =
      checked(values, edges, shared_scale, kind, grid, invalid, step, header, ranks);
  Launch launch(values);
  PartSums parts(launch, values, args.scales.groups);
  launch.run(grid_for(args.scales.groups.count), prepare_kernel, args, parts.get());
}

void lanes_update_cuda(Tensor mean, Tensor edges, Tensor shared_scale, Tensor kind, Tensor header,
                       Tensor next_scale, Tensor next_kind, int64_t ranks) {
  LanesUpdate args = checked(mean, edges, shared_scale, kind, header, next_scale, next_kind, ranks);
  Launch launch(mean);
  PartSums parts(launch, mean, args.scales.groups);
  launch.run(grid_for(Parts{args.scales.groups}.limit(args.scales.size)), update_kernel, args,
             parts.get());
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, HVD_CUDA_KEY, library) {
  library.impl("lanes_prepare", TORCH_BOX(&hvd_compress::lanes_prepare_cuda));
  library.impl("lanes_update", TORCH_BOX(&hvd_compress::lanes_update_cuda));
}
