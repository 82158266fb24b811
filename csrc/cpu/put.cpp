// put on the CPU.
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "../put_rim.h"
#include "segments.h"

namespace hvd_compress {
namespace {

constexpr int64_t kGrain = 1024;  // blocks a thread takes at least

// Every entry of a part's blocks becomes its block's mean.
template <typename T>
void spread(const float* block_means, float scale, int64_t first, int64_t last, T* grad,
            int64_t entries) {
  for (int64_t block = first; block < last; ++block) {
    T value = static_cast<T>(block_means[block] * scale);
    int64_t begin = std::min(block * kBlock, entries);
    std::fill(grad + begin, grad + std::min(begin + kBlock, entries), value);
  }
}

// In slot order: of two slots of one entry the later has the last word.
template <typename T, bool kVelocity>
void put_part(const Put& args, const Segment& segment, int64_t first, int64_t last, T* grad,
              int64_t entries) {
  float* residual = args.residual + segment.first_block * kBlock;
  float* velocity = kVelocity ? args.velocity + segment.first_block * kBlock : nullptr;
  const float* base = args.block_means ? args.block_means + segment.first_block : nullptr;
  const float *means = args.mean, *lost = args.lost;
  float scale = args.scale;
  if (base) spread(base, scale, first, last, grad, entries);
  for_slots(
      args.picks, segment, first, last,
      [=](int64_t entry) {
        __builtin_prefetch(residual + entry, 1);
        if (kVelocity) __builtin_prefetch(velocity + entry, 1);
        if (entry < entries) __builtin_prefetch(grad + entry, 1);
      },
      [=](int64_t slot, int64_t entry) {
        float mean = means[slot];
        float value = base ? base[entry / kBlock] * scale + mean * scale : mean * scale;
        if (entry < entries) grad[entry] = static_cast<T>(value);
        if (!is_finite(mean)) return;
        residual[entry] = lost[slot];
        if (kVelocity) velocity[entry] = 0.0f;
      });
}

void put_cpu(std::vector<Tensor> grads, Tensor residual, std::optional<Tensor> velocity,
             Tensor offsets, Tensor segments, Tensor mean, Tensor lost, int64_t phase, double scale,
             std::optional<Tensor> block_means) {
  Put args =
      checked(grads, residual, velocity, offsets, segments, mean, lost, phase, scale, block_means);
  check_segments(args.picks);
  const Picks& picks = args.picks;
  torch::stable::parallel_for(0, picks.blocks, kGrain, [&](int64_t begin, int64_t end) {
    for_parts(picks, begin, end, [&](int64_t index, int64_t first, int64_t last) {
      const Segment& segment = picks.segments[index];
      const Tensor& grad = grads[index];
      with_type(grad.scalar_type(), [&](auto type) {
        using T = decltype(type);
        auto put = args.velocity ? put_part<T, true> : put_part<T, false>;
        put(args, segment, first, last, data<T>(grad), grad.numel());
      });
    });
  });
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CPU, library) {
  library.impl("put", TORCH_BOX(&hvd_compress::put_cpu));
}
