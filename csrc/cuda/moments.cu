// moments on CUDA.
#include "../moments.h"
#include "moments.h"

namespace hvd_compress {
namespace {

__global__ void __launch_bounds__(kThreads)
    moments_kernel(const __grid_constant__ Moments args, const Sums* __restrict__ parts) {
  int64_t group = warp_id();
  if (group >= args.groups.count || !args.groups.within(group, args.size)) return;
  Sums sums = group_moments(args.groups, parts, group);
  if (lane_id() == 0) args.store(group, sums);
}

void moments_cuda(Tensor values, Tensor edges, Tensor out) {
  Moments args = checked(values, edges, out);
  if (args.groups.count == 0) return;
  Launch launch(values);
  PartSums parts(launch, values, args.groups);
  launch.run(grid_for(args.groups.count), moments_kernel, args, parts.get());
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, HVD_CUDA_KEY, library) {
  library.impl("moments", TORCH_BOX(&hvd_compress::moments_cuda));
}
