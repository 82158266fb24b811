// means_send and means_keep on the CPU.
#include "../means_rim.h"
#include "any.h"
#include "isa.h"

namespace hvd_compress {
namespace {

constexpr int64_t kGrain = 16384;  // blocks a thread takes at least

template <bool kVelocity>
struct Send {
  static HVD_BODY bool run(const MeansSend* args, int64_t begin, int64_t end) {
    float* __restrict fresh = args->fresh;
    float* __restrict held = args->held;
    float* __restrict velocity = args->velocity;
    float* __restrict out = args->out;
    float momentum = args->momentum;
    uint32_t bad = 0;
    for (int64_t i = begin; i < end; ++i) {
      Entry entry =
          accumulate<kVelocity>(fresh[i], held[i], kVelocity ? velocity[i] : 0.0f, momentum);
      held[i] = out[i] = entry.residual;
      if (kVelocity) velocity[i] = entry.velocity;
      fresh[i] = 0.0f;
      bad |= !entry.finite;
    }
    return bad;
  }
};

struct Keep {
  static HVD_BODY void run(const MeansKeep* args, int64_t begin, int64_t end) {
    const float* __restrict mean = args->mean;
    const float* __restrict lost = args->lost;
    float* __restrict held = args->held;
    for (int64_t i = begin; i < end; ++i) held[i] = is_finite(mean[i]) ? lost[i] : held[i];
  }
};

void means_send_cpu(Tensor fresh, Tensor held, std::optional<Tensor> velocity, Tensor out,
                    Tensor invalid, double momentum) {
  MeansSend args = checked(fresh, held, velocity, out, invalid, momentum);
  bool bad = any_part(args.blocks, kGrain, [&](int64_t begin, int64_t end) {
    return args.velocity ? run_best<Send<true>>(&args, begin, end)
                         : run_best<Send<false>>(&args, begin, end);
  });
  if (bad) *args.invalid |= 1;
}

void means_keep_cpu(Tensor mean, Tensor lost, Tensor held) {
  MeansKeep args = checked(mean, lost, held);
  torch::stable::parallel_for(0, args.blocks, kGrain, [&](int64_t begin, int64_t end) {
    run_best<Keep>(&args, begin, end);
  });
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CPU, library) {
  library.impl("means_send", TORCH_BOX(&hvd_compress::means_send_cpu));
  library.impl("means_keep", TORCH_BOX(&hvd_compress::means_keep_cpu));
}
