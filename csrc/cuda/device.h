// The CUDA constructs that a host compiler cannot parse, as macros. The tests define them for a GPU
// that is emulated on the CPU: tests/emulation/cuda_runtime.h.
#pragma once

#include <cuda_runtime.h>

#ifndef HVD_EMULATED
#define HVD_CUDA_KEY CUDA  // the dispatch key of the operators
#define HVD_CUDA_ARCH __CUDA_ARCH__
#define HVD_PINNED true  // whether tables for the device are made in pinned memory
#define HVD_SHARED(type, name, size) __shared__ alignas(16) type name[size]
#define HVD_LAUNCH(kernel, grid, threads, stream) kernel<<<grid, threads, 0, stream>>>

namespace hvd_compress {

// Store one word to global memory. In assembly, because nvcc 13.0 splits some assignments.
__device__ __forceinline__ void store_word(uint4* to, uint4 word) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
               "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
               : "memory");
}
__device__ __forceinline__ void store_word(uint2* to, uint2 word) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(word.x),
               "r"(word.y)
               : "memory");
}

}  // namespace hvd_compress
#endif
