// moments on the CPU.
#include "moments.h"

#include "../moments.h"
#include "groups.h"

namespace hvd_compress {
namespace {

void moments_cpu(Tensor values, Tensor edges, Tensor out) {
  Moments args = checked(values, edges, out);
  check_edges(args.groups, args.size);
  for_moments(args.groups, args.values,
              [&](int64_t group, const Sums& sums) { args.store(group, sums); });
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CPU, library) {
  library.impl("moments", TORCH_BOX(&hvd_compress::moments_cpu));
}
