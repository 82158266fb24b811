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

// Both ways to write a gradient take the slots in order: of two slots of one entry the later has
// the last word.

template <typename T>
void put_entries(const Put& args, const Segment& segment, int64_t first, int64_t last, T* grad,
                 int64_t entries) {
  const float* mean = args.remains.mean;
  float scale = args.scale;
  for_slots(
      args.picks, segment, first, last,
      [=](int64_t entry) {
        if (entry < entries) __builtin_prefetch(grad + entry, 1);
      },
      [=](int64_t slot, int64_t entry) {
        if (entry < entries) grad[entry] = static_cast<T>(mean[slot] * scale);
      });
}

// With the blocks' means the gradient is written whole, a block at a time in the L1 cache.
template <typename T>
void put_whole(const Put& args, const Segment& segment, int64_t first, int64_t last, T* grad,
               int64_t entries) {
  const float* base = args.block_means + segment.first_block;
  const float* mean = args.remains.mean;
  const uint8_t* offsets = args.picks.offsets;
  float scale = args.scale;
  bool past_caches = args.picks.blocks > kCached;
  Walk walk(segment, first, args.picks.phase);
  for (int64_t block = first; block < last; ++block) {
    alignas(64) T values[kBlock];
    float all = base[block] * scale;
    std::fill(values, values + kBlock, static_cast<T>(all));
    auto [slot, end] = walk.next();
    for (; slot < end; ++slot) {
      values[offsets[slot]] = static_cast<T>(all + mean[slot] * scale);
    }
    int64_t begin = std::min(block * kBlock, entries);
    size_t bytes = std::min<int64_t>(entries - begin, kBlock) * sizeof(T);  // the rest is padding
    if (past_caches) {
      stream(grad + begin, values, bytes);
    } else {
      memcpy(static_cast<void*>(grad + begin), values, bytes);
    }
  }
}

// What is left of the slots' entries in the bucket.
void put_remains(const Put& args, const Segment& segment, int64_t first, int64_t last) {
  const Remains& remains = args.remains;
  int64_t base = segment.first_block * kBlock;
  for_slots(
      args.picks, segment, first, last,
      [=](int64_t entry) {
        __builtin_prefetch(remains.residual + base + entry, 1);
        if (remains.velocity) __builtin_prefetch(remains.velocity + base + entry, 1);
      },
      [=](int64_t slot, int64_t entry) {
        if (remains.counts(slot)) remains.write(slot, base + entry);
      });
}

void put_cpu(std::vector<Tensor> grads, Tensor residual, std::optional<Tensor> velocity,
             Tensor offsets, Tensor segments, Tensor mean, std::optional<Tensor> lost,
             int64_t phase, double scale, std::optional<Tensor> block_means) {
  Put args =
      checked(grads, residual, velocity, offsets, segments, mean, lost, phase, scale, block_means);
  check_segments(args.picks);
  const Picks& picks = args.picks;
  torch::stable::parallel_for(0, picks.blocks, kGrain, [&](int64_t begin, int64_t end) {
    for_parts(picks, begin, end, [&](int64_t index, int64_t first, int64_t last) {
      const Segment& segment = picks.segments[index];
      const Tensor& grad = grads[index];
      if (grad.numel() > 0) {  // else skipped
        with_type(grad.scalar_type(), [&](auto type) {
          using T = decltype(type);
          auto put = args.block_means ? put_whole<T> : put_entries<T>;
          put(args, segment, first, last, data<T>(grad), grad.numel());
        });
      }
      if (args.remains.lost) put_remains(args, segment, first, last);
    });
    streamed();
  });
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CPU, library) {
  library.impl("put", TORCH_BOX(&hvd_compress::put_cpu));
}
