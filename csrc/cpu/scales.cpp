// lanes_prepare and lanes_update on the CPU.
#include "../scales.h"

#include <algorithm>
#include <limits>

#include "groups.h"
#include "moments.h"

namespace hvd_compress {
namespace {

void lanes_prepare_cpu(Tensor values, Tensor edges, Tensor shared_scale, Tensor kind, Tensor grid,
                       Tensor invalid, Tensor step, Tensor header, int64_t ranks) {
  LanesPrepare args =
      checked(values, edges, shared_scale, kind, grid, invalid, step, header, ranks);
  check_edges(args.scales.groups, args.scales.size);
  for (int64_t i = 0; i < args.scales.groups.count; ++i) {
    check_range("kind", 0, args.scales.kind[i], args.kinds - 1);
  }
  for_moments(args.scales.groups, args.values,
              [&](int64_t group, const Sums& sums) { prepare_group(args, group, sums); });
}

void lanes_update_cpu(Tensor mean, Tensor edges, Tensor shared_scale, Tensor kind, Tensor header,
                      Tensor next_scale, Tensor next_kind, int64_t ranks) {
  LanesUpdate args = checked(mean, edges, shared_scale, kind, header, next_scale, next_kind, ranks);
  check_edges(args.scales.groups, args.scales.size);
  for_moments(args.scales.groups, args.mean,
              [&](int64_t group, const Sums& sums) { update_group(args, group, sums); });
  if (args.header[0] != 0) {
    std::fill_n(args.mean, args.scales.size, std::numeric_limits<float>::quiet_NaN());
  }
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CPU, library) {
  library.impl("lanes_prepare", TORCH_BOX(&hvd_compress::lanes_prepare_cpu));
  library.impl("lanes_update", TORCH_BOX(&hvd_compress::lanes_update_cpu));
}
