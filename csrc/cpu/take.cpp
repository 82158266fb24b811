// take on the CPU.
#include <torch/csrc/stable/ops.h>

#include "../take_rim.h"
#include "segments.h"

namespace hvd_compress {
namespace {

constexpr int64_t kGrain = 1024;  // blocks a thread takes at least

void take_cpu(Tensor residual, Tensor offsets, Tensor segments, Tensor values, int64_t phase) {
  Take args = checked(residual, offsets, segments, values, phase);
  check_segments(args.picks);
  const Picks& picks = args.picks;
  torch::stable::parallel_for(0, picks.blocks, kGrain, [&](int64_t begin, int64_t end) {
    for_parts(picks, begin, end, [&](int64_t index, int64_t first, int64_t last) {
      const Segment& segment = picks.segments[index];
      const float* from = args.residual + segment.first_block * kBlock;
      float* to = args.values;
      for_slots(
          picks, segment, first, last, [=](int64_t entry) { __builtin_prefetch(from + entry); },
          [=](int64_t slot, int64_t entry) { to[slot] = from[entry]; });
    });
  });
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CPU, library) {
  library.impl("take", TORCH_BOX(&hvd_compress::take_cpu));
}
