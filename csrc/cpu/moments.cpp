// moments on the CPU: a group at a time.
#include "moments.h"

#include <torch/csrc/stable/ops.h>

#include "../moments_rim.h"
#include "groups.h"
#include "isa.h"

namespace hvd_compress {
namespace {

void moments_cpu(Tensor values, Tensor edges, Tensor out) {
  Moments args = checked(values, edges, out);
  check_edges(args.groups, args.size);
  torch::stable::parallel_for(0, args.groups.count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      int64_t first = args.groups.edges[group];
      run_best<GroupMoments>(args.values + first, args.groups.edges[group + 1] - first,
                             args.out + 3 * group);
    }
  });
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CPU, library) {
  library.impl("moments", TORCH_BOX(&hvd_compress::moments_cpu));
}
