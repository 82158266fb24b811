// put on CUDA: one launch for a chunk of tensors, a warp to a block.
//
// The tensors' addresses travel in the kernel's arguments: no copy to the device, nothing to keep
// alive until the kernel has run.
#include <algorithm>

#include "../put_rim.h"
#include "warp.h"

namespace hvd_compress {
namespace {

constexpr int kTensors = 192;  // so that all arguments stay below the 4 KiB of every driver
constexpr unsigned kGrid =
    4096;  // thread blocks; only the device knows how many blocks a chunk has

struct Chunk {
  int64_t first;  // segment
  int64_t count;
  void* data[kTensors];
  int64_t entries[kTensors];  // 0: skipped
  ScalarType dtype[kTensors];
};
static_assert(sizeof(Chunk) + sizeof(Put) + 2 * sizeof(void*) <= 4096);

__device__ __forceinline__ void assign(void* grad, int64_t entry, ScalarType dtype, float value) {
  if (dtype == ScalarType::Float) {
    static_cast<float*>(grad)[entry] = value;
  } else if (dtype == ScalarType::Half) {
    static_cast<Half*>(grad)[entry] = static_cast<Half>(value);
  } else {
    static_cast<BFloat16*>(grad)[entry] = static_cast<BFloat16>(value);
  }
}

// The later of two slots of one entry wins. Within a round of 32 slots the last lane does, and the
// barrier orders the rounds. Every residual is read before any is written.
template <typename P>
__device__ void give_back(const Put& args, int64_t base, Slots slots, const P* total,
                          const P* sent) {
  float values[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    int64_t slot = slots.begin + i * kLanes + lane_id();
    values[i] = slot < slots.end ? args.residual[base + args.offsets[slot]] : 0.0f;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    int64_t slot = slots.begin + i * kLanes + lane_id();
    bool active = slot < slots.end &&
                  returns(static_cast<float>(total[slot]), static_cast<float>(sent[slot]));
    int offset = active ? args.offsets[slot] : 0;
    if (last_of_equals(offset, active)) {
      args.residual[base + offset] = values[i] + static_cast<float>(sent[slot]);
    }
    __syncwarp();
  }
}

template <typename P>
__device__ __forceinline__ void put_block(const Put& args, const Chunk& chunk, int64_t block,
                                          const P* total, const P* sent) {
  const Segment* segments = args.segments + chunk.first;
  int64_t index = find_segment(segments, chunk.count, block);
  if (index < 0) return;
  Segment segment = segments[index];
  if (!fits(segment, args.blocks, args.slots)) return;  // the host cannot check this
  if (block >= segment.first_block + segment.blocks) return;
  Slots slots = slots_of(segment, block, args.phase);

  int64_t first = (block - segment.first_block) * kBlock;
  int64_t inside = chunk.entries[index] - first;  // <= 0: skipped, or padding
  bool lost = false;
  for (int64_t begin = slots.begin; begin < slots.end; begin += kLanes) {
    int64_t slot = begin + lane_id();
    bool active = slot < slots.end;
    float value = active ? static_cast<float>(total[slot]) : 0.0f;
    int offset = active ? args.offsets[slot] : 0;
    lost |= !is_finite(value);
    if (last_of_equals(offset, active) && offset < inside) {
      assign(chunk.data[index], first + offset, chunk.dtype[index], value * args.scale);
    }
    __syncwarp();  // a later round overwrites this one
  }
  if (__any_sync(kAll, lost)) give_back(args, block * kBlock, slots, total, sent);
}

template <typename P>
__global__ void __launch_bounds__(kThreads)
    put_kernel(const __grid_constant__ Put args, const __grid_constant__ Chunk chunk,
               const P* __restrict__ total, const P* __restrict__ sent) {
  Segment last = args.segments[chunk.first + chunk.count - 1];
  int64_t end = min(last.first_block + last.blocks, args.blocks);
  int64_t block = args.segments[chunk.first].first_block + warp_id();
  for (; block < end; block += static_cast<int64_t>(gridDim.x) * kWarps) {
    put_block(args, chunk, block, total, sent);
  }
}

template <typename P>
void run(const Put& args, const Chunk& chunk, const Tensor& total, const Tensor& sent,
         cudaStream_t stream) {
  unsigned grid = std::min(grid_for(args.blocks), kGrid);
  const P* total_data = const_data<P>(total);
  const P* sent_data = const_data<P>(sent);
  put_kernel<<<grid, kThreads, 0, stream>>>(args, chunk, total_data, sent_data);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void put_cuda(std::vector<Tensor> grads, Tensor residual, Tensor offsets, Tensor segments,
              Tensor total, Tensor sent, int64_t phase, double scale) {
  Put args = checked(grads, residual, offsets, segments, total, sent, phase, scale);
  if (args.blocks == 0 || args.slots == 0) return;
  Launch launch(residual);
  for (int64_t first = 0; first < args.segment_count; first += kTensors) {
    Chunk chunk{};
    chunk.first = first;
    for (int64_t i = first; i < args.segment_count && i < first + kTensors; ++i) {
      chunk.data[i - first] = grads[i].mutable_data_ptr();
      chunk.entries[i - first] = grads[i].numel();
      chunk.dtype[i - first] = grads[i].scalar_type();
      chunk.count = i - first + 1;
    }
    if (total.scalar_type() == ScalarType::Float) {
      run<float>(args, chunk, total, sent, launch.stream());
    } else {
      run<Half>(args, chunk, total, sent, launch.stream());
    }
  }
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CUDA, library) {
  library.impl("put", TORCH_BOX(&hvd_compress::put_cuda));
}
