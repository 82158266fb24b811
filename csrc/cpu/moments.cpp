// moments on the CPU: the running sums lie side by side, and 32 values are added at once.
#include "../moments.h"

#include <torch/csrc/stable/ops.h>

#include "../moments_rim.h"
#include "groups.h"
#include "isa.h"

namespace hvd_compress {
namespace {

struct Group {
  static HVD_BODY void run(const float* values, int64_t count, double* out) {
    double square[kSums] = {}, fourth[kSums] = {};
    float largest[kSums] = {};
    int64_t whole = count - count % kSums;
    for (int64_t row = 0; row < whole; row += kSums) {
      for (int i = 0; i < kSums; ++i) {
        take_moments(values[row + i], square[i], fourth[i], largest[i]);
      }
    }
    for (int64_t i = 0; i < count - whole; ++i) {
      take_moments(values[whole + i], square[i], fourth[i], largest[i]);
    }
    for (int width = kSums / 2; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) {
        square[i] += square[i + width];
        fourth[i] += fourth[i + width];
        largest[i] = larger(largest[i + width], largest[i]);
      }
    }
    out[0] = square[0];
    out[1] = fourth[0];
    out[2] = largest[0];
  }
};

void moments_cpu(Tensor values, Tensor edges, Tensor out) {
  Moments args = checked(values, edges, out);
  check_edges(args.groups, args.size);
  torch::stable::parallel_for(0, args.groups.count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      int64_t first = args.groups.edges[group];
      run_best<Group>(args.values + first, args.groups.edges[group + 1] - first,
                      args.out + 3 * group);
    }
  });
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CPU, library) {
  library.impl("moments", TORCH_BOX(&hvd_compress::moments_cpu));
}
