// Stands in for the CUDA runtime's header, as far as the kernels in csrc/cuda use it. A kernel is a
// function that emulator.cpp runs on the CPU, once per thread.
//
// Only full masks are emulated. Warp operations take the line that calls them, because all lanes of
// a warp have to be at the same one.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <functional>
#include <source_location>
#include <type_traits>

#define HVD_EMULATED
#define HVD_CUDA_KEY CPU
#define HVD_CUDA_ARCH EMULATED_ARCH
#define HVD_PINNED false
#define HVD_SHARED(type, name, size) \
  auto& name = *static_cast<type(*)[size]>(emulation::shared_memory(sizeof(type[size])))
#define HVD_LAUNCH(kernel, grid, threads, stream) emulation::launcher(kernel, grid, threads)

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct CUstream_st;
using cudaStream_t = CUstream_st*;
using cudaError_t = int;
inline cudaError_t cudaGetLastError() { return 0; }

struct alignas(8) uint2 {
  unsigned x, y;
};

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

namespace emulation {

constexpr unsigned kWarpSize = 32;

struct Position {
  unsigned x = 0;
};

using Site = std::source_location;

// Waits until all lanes of the warp have called the same operation in the same line. Returns the
// values that they gave.
const uint64_t* meet(const char* operation, unsigned mask, uint64_t value, Site site);
// Waits until all threads of the block have called it in the same line.
void barrier(Site site);
// Memory of the thread block, uninitialised. The same one for all its threads.
void* shared_memory(size_t size, Site site = Site::current());
void launch(unsigned grid, unsigned threads, const std::function<void()>& thread);
// Announces an atomic access to the race detector.
void atomic_access(void* address, size_t size);
unsigned lane();

template <typename T>
uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t) && std::is_arithmetic_v<T>);
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <typename T>
T from_bits(uint64_t bits) {
  T value;
  memcpy(&value, &bits, sizeof(T));
  return value;
}

template <typename... Parameters>
auto launcher(void (*kernel)(Parameters...), unsigned grid, unsigned threads) {
  return [=](const std::type_identity_t<Parameters>&... args) {
    launch(grid, threads, [&] { kernel(args...); });
  };
}

// The value of another lane.
template <typename T>
T shuffled(unsigned mask, T value, unsigned from, Site site) {
  return from_bits<T>(meet("shuffle", mask, to_bits(value), site)[from]);
}

}  // namespace emulation

extern emulation::Position threadIdx, blockIdx, blockDim, gridDim;

#define HVD_SITE emulation::Site site = emulation::Site::current()

inline void __syncthreads(HVD_SITE) { emulation::barrier(site); }

inline void __syncwarp(unsigned mask = 0xffffffffu, HVD_SITE) {
  emulation::meet("__syncwarp", mask, 0, site);
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int from, HVD_SITE) {
  return emulation::shuffled(mask, value, static_cast<unsigned>(from) % emulation::kWarpSize, site);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int by, HVD_SITE) {
  return emulation::shuffled(mask, value, emulation::lane() ^ static_cast<unsigned>(by), site);
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, HVD_SITE) {
  unsigned lane = emulation::lane();
  return emulation::shuffled(mask, value, lane >= by ? lane - by : lane, site);
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, HVD_SITE) {
  unsigned lane = emulation::lane();
  return emulation::shuffled(mask, value, lane + by < emulation::kWarpSize ? lane + by : lane,
                             site);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, HVD_SITE) {
  const uint64_t* all = emulation::meet("vote", mask, predicate != 0, site);
  unsigned bits = 0;
  for (unsigned i = 0; i < emulation::kWarpSize; ++i) bits |= static_cast<unsigned>(all[i]) << i;
  return bits;
}

inline int __any_sync(unsigned mask, int predicate, HVD_SITE) {
  return __ballot_sync(mask, predicate, site) != 0;
}

template <typename T>
unsigned __match_any_sync(unsigned mask, T value, HVD_SITE) {
  uint64_t mine = emulation::to_bits(value);
  const uint64_t* all = emulation::meet("match", mask, mine, site);
  unsigned bits = 0;
  for (unsigned i = 0; i < emulation::kWarpSize; ++i) bits |= unsigned{all[i] == mine} << i;
  return bits;
}

#if EMULATED_ARCH >= 800
inline int __reduce_add_sync(unsigned mask, int value, HVD_SITE) {
  const uint64_t* all = emulation::meet("reduce", mask, emulation::to_bits(value), site);
  unsigned sum = 0;
  for (unsigned i = 0; i < emulation::kWarpSize; ++i) sum += static_cast<unsigned>(all[i]);
  return static_cast<int>(sum);
}

inline int __reduce_max_sync(unsigned mask, int value, HVD_SITE) {
  const uint64_t* all = emulation::meet("reduce", mask, emulation::to_bits(value), site);
  int largest = value;
  for (unsigned i = 0; i < emulation::kWarpSize; ++i) {
    largest = std::max(largest, emulation::from_bits<int>(all[i]));
  }
  return largest;
}
#endif

// In assembly on a GPU: csrc/cuda/device.h.
template <typename Word>
inline void store_word(Word* to, Word word) {
  *to = word;
}

inline int __popc(unsigned value) { return std::popcount(value); }
inline int __clz(int value) { return std::countl_zero(static_cast<unsigned>(value)); }
inline int __ffs(int value) {
  return value ? std::countr_zero(static_cast<unsigned>(value)) + 1 : 0;
}

inline int atomicOr(int* address, int value) {
  emulation::atomic_access(address, sizeof(int));
  return __atomic_fetch_or(address, value, __ATOMIC_RELAXED);
}

using std::max;
using std::min;
