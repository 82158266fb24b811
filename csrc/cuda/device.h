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
#endif
