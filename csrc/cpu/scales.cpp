// lanes_prepare and lanes_follow on the CPU: a group at a time.
#include "../scales.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <limits>

#include "../scales_rim.h"
#include "groups.h"
#include "isa.h"
#include "moments.h"

namespace hvd_compress {
namespace {

Sums sums_of(const Scales& scales, const float* values, int64_t group) {
  double out[3];
  run_best<GroupMoments>(values + scales.groups.edges[group], scales.count(group), out);
  return {out[0], out[1]};
}

// Calls work(group) for all groups; they are as few as a bucket's parameters.
template <typename Work>
void for_groups(const Scales& scales, const Work& work) {
  torch::stable::parallel_for(0, scales.groups.count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) work(group);
  });
}

void lanes_prepare_cpu(Tensor values, Tensor edges, Tensor shared, Tensor kind, Tensor grid,
                       Tensor invalid, Tensor step, Tensor rest, int64_t ranks) {
  Prepare args = checked(values, edges, shared, kind, grid, invalid, step, rest, ranks);
  check_edges(args.scales.groups, args.scales.size);
  for (int64_t i = 0; i < args.scales.groups.count; ++i) {
    check_range("kind", 0, args.scales.kind[i], args.kinds - 1);
  }
  for_groups(args.scales, [&](int64_t group) {
    prepare_group(args, group, sums_of(args.scales, args.values, group));
  });
}

void lanes_follow_cpu(Tensor mean, Tensor edges, Tensor shared, Tensor kind, Tensor rest,
                      Tensor next_shared, Tensor next_kind, int64_t ranks) {
  Follow args = checked(mean, edges, shared, kind, rest, next_shared, next_kind, ranks);
  check_edges(args.scales.groups, args.scales.size);
  for_groups(args.scales, [&](int64_t group) {
    follow_group(args, group, sums_of(args.scales, args.mean, group));
  });
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
