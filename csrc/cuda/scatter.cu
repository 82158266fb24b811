// scatter on CUDA: one launch per chunk of tensors, one warp per block. The tensors' addresses are
// kernel arguments, so they need no copy to the device.
#include <algorithm>

#include "../scatter.h"
#include "segments.h"

namespace hvd_compress {
namespace {

constexpr int kTensors = 192;     // keeps the arguments below 4 KiB, the limit of older drivers
constexpr unsigned kGrid = 4096;  // thread blocks, at most

struct Chunk {
  int64_t first;  // the first segment
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

__device__ __forceinline__ void scatter_block(const Scatter& args, const Chunk& chunk,
                                              int64_t block) {
  const BucketSlots& bucket = args.bucket;
  BlockSlots slots = slots_of(bucket, bucket.segments + chunk.first, chunk.count, block);
  if (slots.segment < 0) return;                                // in no segment
  int64_t inside = chunk.entries[slots.segment] - slots.entry;  // <= 0: skipped or padding
  float base = 0.0f;
  if (args.block_means) {
    base = args.block_means[block] * args.scale;
    for (int index = lane_id(); index < kBlock && index < inside; index += kLanes) {
      assign(chunk.data[slots.segment], slots.entry + index, chunk.dtype[slots.segment], base);
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
          assign(chunk.data[slots.segment], slots.entry + index, chunk.dtype[slots.segment], value);
        });
  }
  if (args.update.error) update_residual(args.update, bucket.indices, slots.range, block * kBlock);
}

__global__ void __launch_bounds__(kThreads)
    scatter_kernel(const __grid_constant__ Scatter args, const __grid_constant__ Chunk chunk) {
  const Segment* segments = args.bucket.segments + chunk.first;
  Segment last = segments[chunk.count - 1];
  // Not checked on the host. Whatever the table holds, the walk is within the bucket, and nothing
  // overflows.
  uint64_t sum = static_cast<uint64_t>(last.first_block) + static_cast<uint64_t>(last.blocks);
  int64_t end = min(static_cast<int64_t>(sum), args.bucket.blocks);
  int64_t block = max(segments[0].first_block, int64_t{0});
  if (block >= end) return;
  block += warp_id();
  for (; block < end; block += static_cast<int64_t>(gridDim.x) * kWarps) {
    scatter_block(args, chunk, block);
  }
}

int64_t blocks_of(const Tensor& grad) { return (grad.numel() + kBlock - 1) / kBlock; }

void scatter_cuda(std::vector<Tensor> grads, Tensor residual, std::optional<Tensor> velocity,
                  Tensor indices, Tensor segments, Tensor mean,
                  std::optional<Tensor> quantization_error, int64_t phase, double scale,
                  std::optional<Tensor> block_means) {
  Scatter args = checked(grads, residual, velocity, indices, segments, mean, quantization_error,
                         phase, scale, block_means);
  const BucketSlots& bucket = args.bucket;
  if (bucket.blocks == 0 || (bucket.slots == 0 && !block_means)) return;
  Launch launch(residual);
  // The segments are on the device, but a gradient has as many blocks as its segment. Those of
  // skipped gradients are among the bucket's others; they matter for the residual only.
  int64_t others = bucket.blocks;
  for (const Tensor& grad : grads) others -= blocks_of(grad);
  for (int64_t first = 0; first < bucket.segment_count; first += kTensors) {
    Chunk chunk{};
    chunk.first = first;
    int64_t blocks = 0;
    bool skips = false;
    for (int64_t i = first; i < bucket.segment_count && i < first + kTensors; ++i) {
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
