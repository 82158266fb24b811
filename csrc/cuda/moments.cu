// moments on CUDA.
#include "../moments.h"
#include "moments.h"

namespace hvd_compress {
namespace {

// The moments of groups of several parts. A warp looks at up to 32 groups, `warps` apart.
__global__ void __launch_bounds__(kThreads)
    moments_kernel(const __grid_constant__ Moments args, const Sums* __restrict__ parts) {
  int64_t warps = static_cast<int64_t>(gridDim.x) * kWarps;
  int64_t group = warp_id() + lane_id() * warps;
  bool several = group < args.groups.count && args.groups.within(group, args.size) &&
                 !one_part(args.groups, group);
  for (unsigned left = __ballot_sync(kAll, several); left != 0; left &= left - 1) {
    int64_t found = warp_id() + (__ffs(static_cast<int>(left)) - 1) * warps;
    Sums sums = group_moments(args.groups, parts, found);
    if (lane_id() == 0) args.store(found, sums);
  }
}

}  // namespace

void store_moments(const Launch& launch, const Tensor& values, const Moments& args) {
  int64_t count = args.groups.count;
  if (count == 0) return;
  PartSums parts(launch, values, args.groups, args.out);
  int64_t warps = has_short_parts(args.groups, args.size) ? (count + kLanes - 1) / kLanes : count;
  launch.run(grid_for(warps), moments_kernel, args, parts.get());
}

namespace {

void moments_cuda(Tensor values, Tensor edges, Tensor out) {
  Moments args = checked(values, edges, out);
  store_moments(Launch(values), values, args);
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, HVD_CUDA_KEY, library) {
  library.impl("moments", TORCH_BOX(&hvd_compress::moments_cuda));
}
