// Kernels with one fault each, which the emulator must find, and the same without the fault.
#include <exception>
#include <string>

#include "cuda_runtime.h"

namespace {

constexpr unsigned kThreads = 64;

// Every thread gives its number to the next one, of the block or of the warp.
void exchange(int* out, bool synchronised) {
  HVD_SHARED(int, numbers, kThreads);
  unsigned thread = threadIdx.x;
  numbers[thread] = static_cast<int>(thread);
  if (synchronised) __syncthreads();
  out[blockIdx.x * kThreads + thread] = numbers[(thread + 1) % kThreads];
}

void exchange_in_warp(int* out, bool synchronised) {
  int* numbers = out + blockIdx.x * kThreads + threadIdx.x / 32 * 32;
  unsigned lane = threadIdx.x % 32;
  numbers[lane] = 0;
  if (synchronised) __syncwarp();
  numbers[(lane + 1) % 32] += 1;
}

void flag(int* out, bool atomic) {
  if (atomic) {
    atomicOr(out, 1);
  } else {
    *out = 1;
  }
}

void lane_leaves(int* out, bool all_stay) {
  if (!all_stay && threadIdx.x == 7) return;
  int sum = __shfl_xor_sync(0xffffffffu, 1, 1);
  out[blockIdx.x * kThreads + threadIdx.x] = sum;
}

void thread_leaves(int*, bool all_stay) {
  if (!all_stay && threadIdx.x >= 32) return;
  __syncthreads();
}

void lanes_apart(int*, bool together) {
  if (together || threadIdx.x % 2) {
    __syncwarp();
  } else {
    __ballot_sync(0xffffffffu, 1);
  }
}

void part_of_mask(int*, bool full) { __ballot_sync(full ? 0xffffffffu : 0x7fffffffu, 1); }

void beyond_shared(int*, bool within) {
  HVD_SHARED(int, numbers, kThreads);
  numbers[threadIdx.x + !within] = 1;
}

void uninitialised(int* out, bool written) {
  HVD_SHARED(int, numbers, kThreads);
  if (written || threadIdx.x) numbers[threadIdx.x] = 1;
  out[blockIdx.x * kThreads + threadIdx.x] = numbers[threadIdx.x];
}

using Kernel = void (*)(int*, bool);
constexpr Kernel kKernels[] = {exchange,     exchange_in_warp, flag,
                               lane_leaves,  thread_leaves,    lanes_apart,
                               part_of_mask, beyond_shared,    uninitialised};

}  // namespace

// What the emulator says to a kernel; "" if nothing.
extern "C" __attribute__((visibility("default"))) const char* run_kernel(int kernel, bool right) {
  static std::string message;
  int out[2 * kThreads] = {};
  message.clear();
  try {
    HVD_LAUNCH(kKernels[kernel], 2, kThreads, nullptr)(out, right);
  } catch (const std::exception& error) {
    message = error.what();
  }
  return message.c_str();
}
