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
constexpr int kLineBytes = 64;

// One segment's gradient.
template <typename T>
struct Target {
  T* grad;
  int64_t entries;
  bool past;  // the caches

  // So many values, from entry `begin` on; what lies in the padding is left out.
  template <typename Copy>
  void write(int64_t begin, const T* values, int64_t count, const Copy& copy) const {
    count = std::min(count, entries - begin);
    if (count > 0) copy(static_cast<void*>(grad + begin), values, count * sizeof(T));
  }
};

// The three ways to write a gradient. In all, the slots act in order: of two slots of one entry the
// later has the last word.

template <typename T>
void put_entries(const Put& args, const Segment& segment, int64_t first, int64_t last,
                 const Target<T>& target) {
  for_slots(
      args.picks, segment, first, last,
      [=](int64_t entry) {
        if (entry < target.entries) __builtin_prefetch(target.grad + entry, 1);
      },
      [=](int64_t slot, int64_t entry) {
        if (entry < target.entries) {
          target.grad[entry] = static_cast<T>(args.mean[slot] * args.scale);
        }
      });
}

// Around a slot of a gradient that is zero, all is known: its line need not be read to be written.
// For what lies in no cache only.
template <typename T>
void put_lines(const Put& args, const Segment& segment, int64_t first, int64_t last,
               const Target<T>& target) {
  constexpr int kLine = kLineBytes / sizeof(T);
  const uint8_t* offsets = args.picks.offsets;
  alignas(kLineBytes) T values[kBlock];
  Walk walk(segment, first, args.picks.phase);
  for (int64_t block = first; block < last; ++block) {
    int64_t begin = walk.slot();
    walk.next();
    int64_t end = walk.slot();
    uint32_t lines = 0;
    for (int64_t slot = begin; slot < end; ++slot) {
      int line = offsets[slot] / kLine;
      memset(static_cast<void*>(values + line * kLine), 0, kLineBytes);
      lines |= uint32_t{1} << line;
    }
    for (int64_t slot = begin; slot < end; ++slot) {
      values[offsets[slot]] = static_cast<T>(args.mean[slot] * args.scale);
    }
    for (; lines; lines &= lines - 1) {
      int from = __builtin_ctz(lines) * kLine;
      target.write(block * kBlock + from, values + from, kLine, stream);
    }
  }
}

// With the blocks' means the gradient is written whole, a block at a time in the L1 cache.
template <typename T>
void put_whole(const Put& args, const Segment& segment, int64_t first, int64_t last,
               const Target<T>& target) {
  const float* base = args.block_means + segment.first_block;
  const uint8_t* offsets = args.picks.offsets;
  alignas(kLineBytes) T values[kBlock];
  Walk walk(segment, first, args.picks.phase);
  for (int64_t block = first; block < last; ++block) {
    float all = base[block] * args.scale;
    std::fill(values, values + kBlock, static_cast<T>(all));
    int64_t slot = walk.slot();
    for (walk.next(); slot < walk.slot(); ++slot) {
      values[offsets[slot]] = static_cast<T>(all + args.mean[slot] * args.scale);
    }
    if (target.past) {
      target.write(block * kBlock, values, kBlock, stream);
    } else {
      target.write(block * kBlock, values, kBlock, memcpy);
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
      [=](int64_t slot, int64_t entry) { remains.keep(slot, base + entry); });
}

void put_cpu(std::vector<Tensor> grads, Tensor residual, std::optional<Tensor> velocity,
             Tensor offsets, Tensor segments, Tensor mean, std::optional<Tensor> lost,
             int64_t phase, double scale, std::optional<Tensor> block_means, bool blank) {
  Put args = checked(grads, residual, velocity, offsets, segments, mean, lost, phase, scale,
                     block_means, blank);
  check_segments(args.picks);
  const Picks& picks = args.picks;
  torch::stable::parallel_for(0, picks.blocks, kGrain, [&](int64_t begin, int64_t end) {
    for_parts(picks, begin, end, [&](int64_t index, int64_t first, int64_t last) {
      const Segment& segment = picks.segments[index];
      const Tensor& grad = grads[index];
      if (grad.numel() > 0) {
        with_type(grad.scalar_type(), [&](auto type) {
          using T = decltype(type);
          Target<T> target{data<T>(grad), grad.numel(), picks.blocks > kCached};
          auto put = args.block_means       ? put_whole<T>
                     : blank && target.past ? put_lines<T>
                                            : put_entries<T>;
          put(args, segment, first, last, target);
        });
      }
      if (lost) put_remains(args, segment, first, last);
    });
    streamed();
  });
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CPU, library) {
  library.impl("put", TORCH_BOX(&hvd_compress::put_cpu));
}
