// scatter on CUDA: one launch per chunk of tensors, one warp per block. The tensors' addresses are
// kernel arguments, so they need no copy to the device.
#include <algorithm>

#include "../scatter.h"
#include "hadamard.h"
#include "pieces.h"

namespace hvd_compress {
namespace {

constexpr int kTensors = 192;     // keeps the arguments below 4 KiB, the limit of older drivers
constexpr unsigned kGrid = 4096;  // thread blocks, at most

struct Chunk {
  int64_t first;  // the first piece
  int64_t count;
  void* data[kTensors];
  int64_t entries[kTensors];  // 0: skip
  ScalarType dtype[kTensors];
};
static_assert(sizeof(Chunk) + sizeof(Scatter) <= 4096);

__device__ __forceinline__ void assign(void* grad, int64_t entry, ScalarType dtype, float value) {
  if (dtype == ScalarType::Float) {
    static_cast<float*>(grad)[entry] = value;
  } else if (dtype == ScalarType::Half) {
    static_cast<Half*>(grad)[entry] = static_cast<Half>(value);
  } else {
    static_cast<BFloat16*>(grad)[entry] = static_cast<BFloat16>(value);
  }
}

template <typename T>
__device__ __forceinline__ void write_block(void* grad, int64_t entry,
                                            const float (&from)[kPerLane], int inside) {
  T values[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) values[i] = static_cast<T>(from[i]);
  T* to = static_cast<T*>(grad) + entry;
  store(to, values, inside, reinterpret_cast<uintptr_t>(to) % 16 == 0);
}

// Writes the transform of a block's coefficients to a gradient, of whose block `inside` exist.
__device__ __forceinline__ void scatter_transformed(const Scatter& args, const Chunk& chunk,
                                                    const BlockSlots& slots, int inside) {
  HVD_SHARED(float, shared, kWarps* kBlock);
  float* block = shared + threadIdx.x / kLanes * kBlock;
  for (int index = lane_id(); index < kBlock; index += kLanes) block[index] = 0.0f;
  __syncwarp();
  in_order(
      slots.range, args.bucket.indices, [](int64_t) { return true; },
      [&](int64_t slot, int index) { block[index] = args.update.mean[slot]; });
  float values[kPerLane];
  load(values, block, kBlock, true);
  __syncwarp();
  hadamard_block(values);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    values[i] = (args.sign ? sign_of(values[i]) : values[i]) * args.scale;
  }
  void* grad = chunk.data[slots.piece];
  switch (chunk.dtype[slots.piece]) {
    case ScalarType::Float:
      return write_block<float>(grad, slots.entry, values, inside);
    case ScalarType::Half:
      return write_block<Half>(grad, slots.entry, values, inside);
    default:
      return write_block<BFloat16>(grad, slots.entry, values, inside);
  }
}

__device__ __forceinline__ void scatter_block(const Scatter& args, const Chunk& chunk,
                                              int64_t block) {
  const BucketSlots& bucket = args.bucket;
  BlockSlots slots = slots_of(bucket, bucket.pieces + chunk.first, chunk.count, block);
  if (slots.piece < 0) return;                                // in no piece
  int64_t inside = chunk.entries[slots.piece] - slots.entry;  // <= 0: skipped or padding
  if (args.transform) {
    if (inside > 0)
      scatter_transformed(args, chunk, slots, static_cast<int>(min(inside, int64_t{kBlock})));
    if (args.update.error)
      update_residual(args.update, bucket.indices, slots.range, block * kBlock);
    return;
  }
  float base = 0.0f;
  if (args.block_means) {
    base = args.block_means[block] * args.scale;
    for (int index = lane_id(); index < kBlock && index < inside; index += kLanes) {
      assign(chunk.data[slots.piece], slots.entry + index, chunk.dtype[slots.piece], base);
    }
    __syncwarp();
  }
  if (inside > 0) {  // all slots, also with a mean that is not finite
    in_order(
        slots.range, bucket.indices, [](int64_t) { return true; },
        [&](int64_t slot, int index) {
          if (index >= inside) return;
          float value = args.update.mean[slot] * args.scale;
          if (args.block_means) value = base + value;
          assign(chunk.data[slots.piece], slots.entry + index, chunk.dtype[slots.piece], value);
        });
  }
  if (args.update.error) update_residual(args.update, bucket.indices, slots.range, block * kBlock);
}

__global__ void __launch_bounds__(kThreads)
    scatter_kernel(const __grid_constant__ Scatter args, const __grid_constant__ Chunk chunk) {
  const Piece* pieces = args.bucket.pieces + chunk.first;
  Piece last = pieces[chunk.count - 1];
  // Not checked on the host. Whatever the table holds, the walk is within the bucket, and nothing
  // overflows.
  uint64_t sum = static_cast<uint64_t>(last.first_block) + static_cast<uint64_t>(last.blocks);
  int64_t end = min(static_cast<int64_t>(sum), args.bucket.blocks);
  int64_t block = max(pieces[0].first_block, int64_t{0});
  if (block >= end) return;
  block += warp_id();
  for (; block < end; block += static_cast<int64_t>(gridDim.x) * kWarps) {
    scatter_block(args, chunk, block);
  }
}

int64_t blocks_of(const Tensor& grad) { return (grad.numel() + kBlock - 1) / kBlock; }

void scatter_cuda(std::vector<Tensor> grads, Tensor residual, std::optional<Tensor> velocity,
                  Tensor indices, Tensor pieces, Tensor mean,
                  std::optional<Tensor> quantization_error, int64_t phase, double scale,
                  std::optional<Tensor> block_means, bool transform, bool sign) {
  Scatter args = checked(grads, residual, velocity, indices, pieces, mean, quantization_error,
                         phase, scale, block_means, transform, sign);
  const BucketSlots& bucket = args.bucket;
  if (bucket.blocks == 0 || (bucket.slots == 0 && !block_means && !transform)) return;
  Launch launch(residual);
  // The pieces are on the device, but a gradient has as many blocks as its piece. Those of
  // skipped gradients are among the bucket's others; they matter for the residual only.
  int64_t others = bucket.blocks;
  for (const Tensor& grad : grads) others -= blocks_of(grad);
  for (int64_t first = 0; first < bucket.piece_count; first += kTensors) {
    Chunk chunk{};
    chunk.first = first;
    int64_t blocks = 0;
    bool skips = false;
    for (int64_t i = first; i < bucket.piece_count && i < first + kTensors; ++i) {
      chunk.data[i - first] = grads[i].mutable_data_ptr();
      chunk.entries[i - first] = grads[i].numel();
      chunk.dtype[i - first] = grads[i].scalar_type();
      chunk.count = i - first + 1;
      blocks += blocks_of(grads[i]);
      skips |= grads[i].numel() == 0;
    }
    if (skips && args.update.error) blocks += std::max<int64_t>(others, 0);
    if (blocks == 0) continue;
    unsigned grid = std::min(grid_for(blocks), kGrid);  // any number is right
    launch.run(grid, scatter_kernel, args, chunk);
  }
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, HVD_CUDA_KEY, library) {
  library.impl("scatter", TORCH_BOX(&hvd_compress::scatter_cuda));
}
