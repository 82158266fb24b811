// scatter on CUDA: one warp per block.
#include <algorithm>

#include "../scatter.h"
#include "hadamard.h"
#include "pieces.h"

namespace hvd_compress {
namespace {

constexpr unsigned kGrid = 4096;  // thread blocks, at most

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
__device__ __forceinline__ void scatter_transformed(const Scatter& args, const PieceTensor& grad,
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
  switch (grad.dtype) {
    case ScalarType::Float:
      return write_block<float>(grad.data, slots.entry, values, inside);
    case ScalarType::Half:
      return write_block<Half>(grad.data, slots.entry, values, inside);
    default:
      return write_block<BFloat16>(grad.data, slots.entry, values, inside);
  }
}

__device__ __forceinline__ void scatter_block(const Scatter& args, const PieceTensor* grads,
                                              int64_t block) {
  const BucketSlots& bucket = args.bucket;
  BlockSlots slots = slots_of(bucket, block);
  if (slots.piece < 0) return;  // in no piece
  const PieceTensor grad = grads[slots.piece];
  int64_t inside = min(grad.entries - slots.entry, int64_t{kBlock});  // <= 0: skipped or padding
  if (inside > 0 && args.transform) {
    scatter_transformed(args, grad, slots, static_cast<int>(inside));
  } else if (inside > 0) {
    float base = 0.0f;
    if (args.block_means) {
      base = args.block_means[block] * args.scale;
      for (int index = lane_id(); index < inside; index += kLanes) {
        assign(grad.data, slots.entry + index, grad.dtype, base);
      }
      __syncwarp();
    }
    in_order(  // all slots, also with a mean that is not finite
        slots.range, bucket.indices, [](int64_t) { return true; },
        [&](int64_t slot, int index) {
          if (index >= inside) return;
          float value = args.update.mean[slot] * args.scale;
          if (args.block_means) value = base + value;
          assign(grad.data, slots.entry + index, grad.dtype, value);
        });
  }
  update_residual(args.update, bucket.indices, slots.range, block * kBlock);
}

__global__ void __launch_bounds__(kThreads)
    scatter_kernel(const __grid_constant__ Scatter args, const PieceTensor* __restrict__ grads) {
  for (int64_t block = warp_id(); block < args.bucket.blocks;
       block += static_cast<int64_t>(gridDim.x) * kWarps) {
    scatter_block(args, grads, block);
  }
}

void scatter_cuda(std::vector<Tensor> grads, Tensor residual, std::optional<Tensor> velocity,
                  Tensor indices, Tensor pieces, Tensor mean, Tensor quantization_error,
                  int64_t phase, double scale, std::optional<Tensor> block_means, bool transform,
                  bool sign) {
  Scatter args = checked(residual, velocity, indices, pieces, mean, quantization_error, phase,
                         scale, block_means, transform, sign);
  PieceTensors tensors = checked_tensors(grads, "grads", pieces);
  const BucketSlots& bucket = args.bucket;
  if (bucket.blocks == 0 || (bucket.slots == 0 && !block_means && !transform)) return;
  Launch launch(residual);
  DeviceRows rows(tensors.rows, residual);
  unsigned grid = std::min(grid_for(bucket.blocks), kGrid);
  launch.run(grid, scatter_kernel, args, rows.data());
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, HVD_CUDA_KEY, library) {
  library.impl("scatter", TORCH_BOX(&hvd_compress::scatter_cuda));
}
