// lanes_encode and lanes_decode on CUDA: accesses to values are coalesced, and one thread joins
// each word.
#include "../lanes.h"
#include "groups.h"

namespace hvd_compress {
namespace {

__device__ __forceinline__ int words_of(const Lanes& args) { return kTile / args.count; }

__global__ void __launch_bounds__(kThreads)
    encode_kernel(const __grid_constant__ Lanes args, const float* __restrict__ values,
                  float* __restrict__ error, int64_t* __restrict__ words, bool stochastic) {
  HVD_SHARED(int32_t, digits, kTile);
  int share = words_of(args) * args.count, thread = static_cast<int>(threadIdx.x);
  int64_t first = static_cast<int64_t>(blockIdx.x) * share;
  OfGroup<Grid> grid(args, first + thread);
  for (int local = thread; local < share; local += kThreads) {
    int64_t i = first + local;
    Rounded rounded{};
    if (i < args.size) {
      float draw = stochastic ? uniform(i, args.key) : 0.5f;
      rounded = grid.at(args, i).encode(values[i], draw);
      error[i] = rounded.error;
    }
    digits[local] = rounded.digit;
  }
  __syncthreads();
  for (int local = thread; local < words_of(args); local += kThreads) {
    if (first + local * args.count >= args.size) return;
    uint64_t word = 0;
    for (int lane = 0; lane < args.count; ++lane) {
      word += static_cast<uint64_t>(static_cast<int64_t>(digits[local * args.count + lane]))
              << (args.width * lane);
    }
    words[first / args.count + local] = static_cast<int64_t>(word);
  }
}

struct Step {
  float value;

  __device__ Step(const Lanes& args, int64_t group) : value(args.scale[group] * args.factor) {}
};

__global__ void __launch_bounds__(kThreads)
    decode_kernel(const __grid_constant__ Lanes args, uint64_t bias,
                  const int64_t* __restrict__ words, float* __restrict__ values) {
  int share = words_of(args) * args.count;
  int64_t first = static_cast<int64_t>(blockIdx.x) * share;
  OfGroup<Step> step(args, first + threadIdx.x);
  for (int local = static_cast<int>(threadIdx.x); local < share; local += kThreads) {
    int64_t i = first + local;
    if (i >= args.size) return;
    int word = local / args.count, lane = local % args.count;
    uint64_t biased = static_cast<uint64_t>(words[first / args.count + word]) + bias;
    uint64_t field = (biased >> (args.width * lane)) & ((uint64_t{1} << args.width) - 1);
    uint32_t half = uint32_t{1} << (args.width - 1);
    values[i] = as_value(static_cast<uint32_t>(field), half, step.at(args, i).value);
  }
}

void lanes_encode_cuda(Tensor values, Tensor scale, Tensor edges, Tensor words,
                       Tensor quantization_error, int64_t bits, int64_t width, int64_t key) {
  Lanes args = checked(values, scale, edges, words, bits, width, key, 1.0);
  check_quantization_error(quantization_error, values);
  if (args.size == 0) return;
  Launch launch(values);
  unsigned grid = ceil_div(args.size, kTile / args.count * args.count);
  launch.run(grid, encode_kernel, args, const_data<float>(values), data<float>(quantization_error),
             data<int64_t>(words), key != -1);
}

void lanes_decode_cuda(Tensor words, Tensor scale, Tensor edges, Tensor values, int64_t width,
                       double factor) {
  Lanes args = checked(values, scale, edges, words, 2, width, -1, factor);
  if (args.size == 0) return;
  Launch launch(values);
  unsigned grid = ceil_div(args.size, kTile / args.count * args.count);
  launch.run(grid, decode_kernel, args, args.bias(), const_data<int64_t>(words),
             data<float>(values));
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, HVD_CUDA_KEY, library) {
  library.impl("lanes_encode", TORCH_BOX(&hvd_compress::lanes_encode_cuda));
  library.impl("lanes_decode", TORCH_BOX(&hvd_compress::lanes_decode_cuda));
}
