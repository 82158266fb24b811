// lanes_prepare and lanes_follow on the CPU.
#include "../scales.h"

#include <algorithm>
#include <limits>

#include "../scales_rim.h"
#include "groups.h"
#include "moments.h"

namespace hvd_compress {
namespace {

void lanes_prepare_cpu(Tensor values, Tensor edges, Tensor shared, Tensor kind, Tensor grid,
                       Tensor invalid, Tensor step, Tensor rest, int64_t ranks) {
  Prepare args = checked(values, edges, shared, kind, grid, invalid, step, rest, ranks);
  check_edges(args.scales.groups, args.scales.size);
  for (int64_t i = 0; i < args.scales.groups.count; ++i) {
    check_range("kind", 0, args.scales.kind[i], args.kinds - 1);
  }
  for_moments(args.scales.groups, args.values,
              [&](int64_t group, const Sums& sums) { prepare_group(args, group, sums); });
}

void lanes_follow_cpu(Tensor mean, Tensor edges, Tensor shared, Tensor kind, Tensor rest,
                      Tensor next_shared, Tensor next_kind, int64_t ranks) {
  Follow args = checked(mean, edges, shared, kind, rest, next_shared, next_kind, ranks);
  check_edges(args.scales.groups, args.scales.size);
  for_moments(args.scales.groups, args.mean,
              [&](int64_t group, const Sums& sums) { follow_group(args, group, sums); });
  if (args.rest[0] != 0) {
    std::fill_n(args.mean, args.scales.size, std::numeric_limits<float>::quiet_NaN());
  }
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CPU, library) {
  library.impl("lanes_prepare", TORCH_BOX(&hvd_compress::lanes_prepare_cpu));
  library.impl("lanes_follow", TORCH_BOX(&hvd_compress::lanes_follow_cpu));
}
