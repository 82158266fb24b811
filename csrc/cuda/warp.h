// Kernel launches with one warp per block of 256 entries, and operations across a warp.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include <type_traits>

#include "../checks.h"
#include "device.h"

namespace hvd_compress {

constexpr int kLanes = 32;
constexpr int kPerLane = kBlock / kLanes;  // entries of a block per lane
constexpr int kWarps = 8;                  // per thread block
constexpr int kThreads = kWarps * kLanes;
// Thread blocks that a multiprocessor has at the least: for kernels with many values a lane, which
// then have 128 registers, and spill none to fit in more blocks.
constexpr int kResident = 2;
constexpr unsigned kAll = 0xffffffffu;

// Makes the tensor's device current, and launches kernels on its current stream.
class Launch {
 public:
  explicit Launch(const Tensor& tensor) : guard_(tensor.get_device_index()) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }

  // With `grid` thread blocks of kThreads threads.
  template <typename... Parameters>
  void run(unsigned grid, void (*kernel)(Parameters...),
           const std::type_identity_t<Parameters>&... args) const {
    HVD_LAUNCH(kernel, grid, kThreads, stream_)(args...);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
};

inline unsigned ceil_div(int64_t size, int64_t tile) {
  return static_cast<unsigned>((size + tile - 1) / tile);
}

inline unsigned grid_for(int64_t blocks) { return ceil_div(blocks, kWarps); }

__device__ __forceinline__ int lane_id() { return threadIdx.x % kLanes; }

// The number of this warp in the grid.
__device__ __forceinline__ int64_t warp_id() {
  return static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
}

// The reduction of the lanes' values, in all lanes.
template <typename Join>
__device__ __forceinline__ int reduced(int value, Join join) {
#pragma unroll
  for (int width = kLanes / 2; width > 0; width /= 2) {
    value = join(value, __shfl_xor_sync(kAll, value, width));
  }
  return value;
}

// The sum and the maximum over all lanes: one instruction from sm_80 on.
__device__ __forceinline__ int sum_of_all(int value) {
#if HVD_CUDA_ARCH >= 800
  return __reduce_add_sync(kAll, value);
#else
  return reduced(value, [](int one, int other) { return one + other; });
#endif
}

__device__ __forceinline__ int largest_of_all(int value) {
#if HVD_CUDA_ARCH >= 800
  return __reduce_max_sync(kAll, value);
#else
  return reduced(value, [](int one, int other) { return max(one, other); });
#endif
}

// The sum over the lanes before this one.
__device__ __forceinline__ int sum_before(int value) {
  int sum = value;
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    int other = __shfl_up_sync(kAll, sum, step);
    if (lane_id() >= step) sum += other;
  }
  return sum - value;
}

// Whether this is the last of the active lanes with an equal index.
__device__ __forceinline__ bool last_of_equals(int index, bool active) {
  int key = active ? index : kBlock + lane_id();  // inactive: unique
  unsigned equals = __match_any_sync(kAll, key);
  return active && lane_id() == kLanes - 1 - __clz(equals);
}

}  // namespace hvd_compress
