// Packing of codes on CUDA. Accesses to values and bytes are coalesced: digits and bytes are
// exchanged between threads in shared memory.
//
// Args has `groups`, `size` and `bits`. Constants has the constants of one group: encode(value,
// error) returns the code and sets the quantization error, decode(code) returns the value.
#pragma once

#include "../pack.h"
#include "groups.h"

namespace hvd_compress {

template <typename Args, typename Constants>
__global__ void __launch_bounds__(kThreads)
    encode_kernel(const __grid_constant__ Args args, const float* values, float* error,
                  uint8_t* __restrict__ codes) {
  HVD_SHARED(uint16_t, digits, kTile);
  HVD_SHARED(uint32_t, packed, kThreads * 4);
  uint8_t* bytes = reinterpret_cast<uint8_t*>(packed);
  int thread = static_cast<int>(threadIdx.x);

  int64_t first = static_cast<int64_t>(blockIdx.x) * kTile;
  OfGroup<Constants> constants(args, first + thread);
  for (int local = thread; local < kTile; local += kThreads) {
    int64_t i = first + local;
    uint32_t code = 0;
    float lost = 0.0f;
    if (i < args.size) code = constants.at(args, i).encode(values[i], lost);
    if (i < args.size && error) error[i] = lost;
    digits[local] = static_cast<uint16_t>(code);
  }
  __syncthreads();
  Unit unit = pack_unit(digits + 8 * thread, args.bits);
  for (int k = 0; k < args.bits; ++k) {
    uint64_t word = k < 8 ? unit.low : unit.high;
    bytes[thread * args.bits + k] = static_cast<uint8_t>(word >> (k % 8 * 8));
  }
  __syncthreads();

  int64_t left = ((args.size - first + 7) / 8) * args.bits;
  int size = static_cast<int>(left < kThreads * args.bits ? left : kThreads * args.bits);
  uint8_t* to = codes + first / 8 * args.bits;
  int whole = reinterpret_cast<uintptr_t>(to) % sizeof(uint32_t) == 0 ? size / 4 : 0;
  for (int k = thread; k < whole; k += kThreads) reinterpret_cast<uint32_t*>(to)[k] = packed[k];
  for (int k = whole * 4 + thread; k < size; k += kThreads) to[k] = bytes[k];
}

// Reads no byte beyond the code.
__device__ __forceinline__ uint32_t code_at(const uint8_t* codes, int64_t i, int bits) {
  const uint8_t* at = codes + (i * bits >> 3);
  int shift = static_cast<int>(i * bits & 7);
  uint32_t word = at[0];
  if (shift + bits > 8) word |= static_cast<uint32_t>(at[1]) << 8;
  if (shift + bits > 16) word |= static_cast<uint32_t>(at[2]) << 16;
  return word >> shift & ((1u << bits) - 1);
}

template <typename Args, typename Constants>
__global__ void __launch_bounds__(kThreads)
    decode_kernel(const __grid_constant__ Args args, const uint8_t* __restrict__ codes,
                  float* __restrict__ values, bool add) {
  int64_t first = static_cast<int64_t>(blockIdx.x) * kTile;
  int64_t end = first + kTile < args.size ? first + kTile : args.size;
  OfGroup<Constants> constants(args, first + threadIdx.x);
  for (int64_t i = first + threadIdx.x; i < end; i += kThreads) {
    float value = constants.at(args, i).decode(code_at(codes, i, args.bits));
    values[i] = add ? values[i] + value : value;
  }
}

template <typename Constants, typename Args>
void encode_all(const Args& args, const Tensor& values, const Tensor& codes, float* error) {
  if (args.size == 0) return;
  Launch launch(values);
  launch.run(ceil_div(args.size, kTile), encode_kernel<Args, Constants>, args,
             const_data<float>(values), error, data<uint8_t>(codes));
}

template <typename Constants, typename Args>
void decode_all(const Args& args, const Tensor& codes, const Tensor& values, bool add) {
  if (args.size == 0) return;
  Launch launch(values);
  launch.run(ceil_div(args.size, kTile), decode_kernel<Args, Constants>, args,
             const_data<uint8_t>(codes), data<float>(values), add);
}

}  // namespace hvd_compress
