// scatter on the CPU.
#include "../scatter.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>

#include "hadamard.h"
#include "isa.h"
#include "pieces.h"
#include "stream.h"

namespace hvd_compress {
namespace {

constexpr int64_t kGrain = 1024;   // blocks per thread, at least
constexpr int64_t kCached = 4096;  // blocks (4 MiB): larger buckets bypass the caches

// Both functions write the slots in order: of several slots of one entry, the last one counts.

template <typename T>
void scatter_entries(const Scatter& args, const Piece& piece, int64_t first, int64_t last, T* grad,
                     int64_t entries) {
  const float* mean = args.update.mean;
  float scale = args.scale;
  for_slots(
      args.bucket, piece, first, last,
      [=](int64_t entry) {
        if (entry < entries) __builtin_prefetch(grad + entry, 1);
      },
      [=](int64_t slot, int64_t entry) {
        if (entry < entries) grad[entry] = static_cast<T>(mean[slot] * scale);
      });
}

// With block means, all of the gradient is written, one block at a time from the L1 cache.
template <typename T>
void scatter_with_means(const Scatter& args, const Piece& piece, int64_t first, int64_t last,
                        T* grad, int64_t entries) {
  const float* base = args.block_means + piece.first_block;
  const float* mean = args.update.mean;
  const uint8_t* indices = args.bucket.indices;
  float scale = args.scale;
  bool bypass_caches = args.bucket.blocks > kCached;
  SlotIterator iterator(piece, first, args.bucket.phase);
  for (int64_t block = first; block < last; ++block) {
    alignas(64) T values[kBlock];
    float all = base[block] * scale;
    std::fill(values, values + kBlock, static_cast<T>(all));
    auto [slot, end] = iterator.next();
    for (; slot < end; ++slot) {
      values[indices[slot]] = static_cast<T>(all + mean[slot] * scale);
    }
    int64_t begin = std::min(block * kBlock, entries);
    size_t bytes = std::min<int64_t>(entries - begin, kBlock) * sizeof(T);  // without padding
    if (bypass_caches) {
      stream_copy(grad + begin, values, bytes);
    } else {
      memcpy(static_cast<void*>(grad + begin), values, bytes);
    }
  }
}

// An entry of a gradient from 16 times the coefficient of the inverse transform.
template <bool kSign, typename T>
struct Coefficient {
  float scale;

  HVD_BODY T operator()(float value) const {
    value *= 1.0f / kGain;
    return static_cast<T>((kSign ? sign_of(value) : value) * scale);
  }
};

template <bool kSign, typename T>
struct Transformed {
  static HVD_BODY void run(const Scatter* args, const Piece* piece, int64_t first, int64_t last,
                           T* grad, int64_t entries) {
    const float* mean = args->update.mean;
    const uint8_t* indices = args->bucket.indices;
    SlotIterator iterator(*piece, first, args->bucket.phase);
    Coefficient<kSign, T> finish{args->scale};
    alignas(64) float coefficients[2][kBlock];
    alignas(64) T values[kBlock];
    auto place = [&](int64_t block) {
      float* these = coefficients[block % 2];
      std::fill(these, these + kBlock, 0.0f);
      auto [slot, end] = iterator.next();
      for (; slot < end; ++slot) these[indices[slot]] = mean[slot];
    };
    place(first);
    for (int64_t block = first; block < last; ++block) {
      // One block ahead: what was just stored in parts cannot be loaded as a whole vector at once.
      if (block + 1 < last) place(block + 1);
      int64_t begin = block * kBlock;
      if (begin + kBlock <= entries) {
        hadamard_block(coefficients[block % 2], grad + begin, finish);
      } else {  // with padding
        hadamard_block(coefficients[block % 2], values, finish);
        for (int i = 0; begin + i < entries; ++i) grad[begin + i] = values[i];
      }
    }
  }
};

template <typename T>
void scatter_transformed(const Scatter& args, const Piece& piece, int64_t first, int64_t last,
                         T* grad, int64_t entries) {
  if (args.sign) {
    run_best<Transformed<true, T>>(&args, &piece, first, last, grad, entries);
  } else {
    run_best<Transformed<false, T>>(&args, &piece, first, last, grad, entries);
  }
}

void update_residual(const Scatter& args, const Piece& piece, int64_t first, int64_t last) {
  const ResidualUpdate& update = args.update;
  int64_t base = piece.first_block * kBlock;
  for_slots(
      args.bucket, piece, first, last,
      [=](int64_t entry) {
        __builtin_prefetch(update.residual + base + entry, 1);
        if (update.velocity) __builtin_prefetch(update.velocity + base + entry, 1);
      },
      [=](int64_t slot, int64_t entry) {
        if (update.applies(slot)) update.write(slot, base + entry);
      });
}

void scatter_cpu(std::vector<Tensor> grads, Tensor residual, std::optional<Tensor> velocity,
                 Tensor indices, Tensor pieces, Tensor mean, Tensor quantization_error,
                 int64_t phase, double scale, std::optional<Tensor> block_means, bool transform,
                 bool sign) {
  Scatter args = checked(residual, velocity, indices, pieces, mean, quantization_error, phase,
                         scale, block_means, transform, sign);
  PieceTensors tensors = checked_tensors(grads, "grads", pieces);
  check_pieces(args.bucket);
  const BucketSlots& bucket = args.bucket;
  torch::stable::parallel_for(0, bucket.blocks, kGrain, [&](int64_t begin, int64_t end) {
    for_parts(bucket.pieces, bucket.piece_count, begin, end,
              [&](int64_t index, int64_t first, int64_t last) {
                const Piece& piece = bucket.pieces[index];
                const PieceTensor& grad = tensors.rows[index];
                if (grad.entries > 0) {  // else skipped
                  with_type(grad.dtype, [&](auto type) {
                    using T = decltype(type);
                    auto scatter = args.transform     ? scatter_transformed<T>
                                   : args.block_means ? scatter_with_means<T>
                                                      : scatter_entries<T>;
                    scatter(args, piece, first, last, static_cast<T*>(grad.data), grad.entries);
                  });
                }
                update_residual(args, piece, first, last);
              });
    stream_fence();
  });
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CPU, library) {
  library.impl("scatter", TORCH_BOX(&hvd_compress::scatter_cpu));
}
