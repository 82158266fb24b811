// block_means_send and block_means_keep on the CPU.
#include "../block_means.h"

#include "any.h"
#include "isa.h"

namespace hvd_compress {
namespace {

constexpr int64_t kGrain = 16384;  // blocks per thread, at least

template <bool kVelocity>
struct Send {
  static HVD_BODY bool run(const BlockMeansSend* args, int64_t begin, int64_t end) {
    float* __restrict fresh = args->fresh;
    float* __restrict unsent = args->unsent;
    float* __restrict velocity = args->velocity;
    float* __restrict out = args->out;
    float momentum = args->momentum;
    uint32_t bad = 0;
    for (int64_t i = begin; i < end; ++i) {
      Entry entry =
          accumulate<kVelocity>(fresh[i], unsent[i], kVelocity ? velocity[i] : 0.0f, momentum);
      unsent[i] = out[i] = entry.residual;
      if (kVelocity) velocity[i] = entry.velocity;
      fresh[i] = 0.0f;
      bad |= !entry.usable;
    }
    return bad;
  }
};

struct Keep {
  static HVD_BODY void run(const BlockMeansKeep* args, int64_t begin, int64_t end) {
    const float* __restrict mean = args->mean;
    const float* __restrict error = args->error;
    float* __restrict unsent = args->unsent;
    for (int64_t i = begin; i < end; ++i) unsent[i] = is_finite(mean[i]) ? error[i] : unsent[i];
  }
};

void block_means_send_cpu(Tensor fresh, Tensor unsent, std::optional<Tensor> velocity, Tensor out,
                          Tensor invalid, double momentum) {
  BlockMeansSend args = checked(fresh, unsent, velocity, out, invalid, momentum);
  bool bad = any_part(args.blocks, kGrain, [&](int64_t begin, int64_t end) {
    return args.velocity ? run_best<Send<true>>(&args, begin, end)
                         : run_best<Send<false>>(&args, begin, end);
  });
  if (bad) *args.invalid |= 1;
}

void block_means_keep_cpu(Tensor mean, Tensor quantization_error, Tensor unsent) {
  BlockMeansKeep args = checked(mean, quantization_error, unsent);
  torch::stable::parallel_for(0, args.blocks, kGrain, [&](int64_t begin, int64_t end) {
    run_best<Keep>(&args, begin, end);
  });
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CPU, library) {
  library.impl("block_means_send", TORCH_BOX(&hvd_compress::block_means_send_cpu));
  library.impl("block_means_keep", TORCH_BOX(&hvd_compress::block_means_keep_cpu));
}
