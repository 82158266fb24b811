// hadamard on the CPU.
#include "hadamard.h"

#include <torch/csrc/stable/ops.h>

#include "../hadamard.h"
#include "isa.h"

namespace hvd_compress {
namespace {

constexpr int64_t kGrain = 512;  // blocks per thread, at least

struct Transform {
  static HVD_BODY void run(float* values, int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) hadamard_block(values + block * kBlock);
  }
};

void hadamard_cpu(Tensor values) {
  Hadamard args = checked(values);
  torch::stable::parallel_for(0, args.blocks, kGrain, [&](int64_t begin, int64_t end) {
    run_best<Transform>(args.values, begin, end);
  });
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CPU, library) {
  library.impl("hadamard", TORCH_BOX(&hvd_compress::hadamard_cpu));
}
