// put on the CPU.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>

#include "../put_rim.h"
#include "segments.h"
#include "stream.h"

namespace hvd_compress {
namespace {

constexpr int64_t kGrain = 1024;   // blocks a thread takes at least
constexpr int64_t kCached = 4096;  // blocks: of more than 4 MiB the gradient goes past the caches

// What one slot leaves behind: the residual's entry and the velocity's.
template <bool kVelocity>
struct Remains {
  float *residual, *velocity;
  const float *mean, *lost;

  Remains(const Put& args, const Segment& segment)
      : residual(args.residual + segment.first_block * kBlock),
        velocity(kVelocity ? args.velocity + segment.first_block * kBlock : nullptr),
        mean(args.mean),
        lost(args.lost) {}

  void touch(int64_t entry) const {
    __builtin_prefetch(residual + entry, 1);
    if (kVelocity) __builtin_prefetch(velocity + entry, 1);
  }

  void put(int64_t slot, int64_t entry) const {
    if (!is_finite(mean[slot])) return;
    residual[entry] = lost[slot];
    if (kVelocity) velocity[entry] = 0.0f;
  }
};

// In slot order: of two slots of one entry the later has the last word.
template <typename T, bool kVelocity>
void put_part(const Put& args, const Segment& segment, int64_t first, int64_t last, T* grad,
              int64_t entries) {
  Remains<kVelocity> remains(args, segment);
  float scale = args.scale;
  for_slots(
      args.picks, segment, first, last,
      [=](int64_t entry) {
        remains.touch(entry);
        if (entry < entries) __builtin_prefetch(grad + entry, 1);
      },
      [=](int64_t slot, int64_t entry) {
        if (entry < entries) grad[entry] = static_cast<T>(remains.mean[slot] * scale);
        remains.put(slot, entry);
      });
}

// With the blocks' means the gradient is written whole, a block at a time in the L1 cache.
template <typename T, bool kVelocity>
void put_whole(const Put& args, const Segment& segment, int64_t first, int64_t last, T* grad,
               int64_t entries) {
  Remains<kVelocity> remains(args, segment);
  const float* base = args.block_means + segment.first_block;
  const uint8_t* offsets = args.picks.offsets;
  float scale = args.scale;
  bool past = args.picks.blocks > kCached;
  for_blocks(
      args.picks, segment, first, last, [=](int64_t entry) { remains.touch(entry); },
      [=](int64_t block, int64_t slot, int64_t end) {
        alignas(64) T values[kBlock];
        float all = base[block] * scale;
        std::fill(values, values + kBlock, static_cast<T>(all));
        for (; slot < end; ++slot) {
          values[offsets[slot]] = static_cast<T>(all + remains.mean[slot] * scale);
          remains.put(slot, block * kBlock + offsets[slot]);
        }
        int64_t begin = std::min(block * kBlock, entries);
        size_t bytes = std::min<int64_t>(entries - begin, kBlock) * sizeof(T);
        if (bytes == 0) return;  // skipped, or padding
        if (past) {
          stream(grad + begin, values, bytes);
        } else {
          memcpy(static_cast<void*>(grad + begin), values, bytes);
        }
      });
  streamed();
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
        auto put = args.block_means ? args.velocity ? put_whole<T, true> : put_whole<T, false>
                   : args.velocity  ? put_part<T, true>
                                    : put_part<T, false>;
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
