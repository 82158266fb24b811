// What the emulator and its race detector know of each other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda_runtime.h"

namespace emulation {

constexpr unsigned kMaxThreads = 1024;  // per thread block

// Where a thread is: accesses of two threads are ordered if a barrier was between them.
struct Clock {
  uint32_t thread;  // of the grid
  uint16_t block_barriers;
  uint16_t warp_barriers;
};

bool in_kernel();
Clock clock_of_thread();
// Whether the memory belongs to one thread, or to the emulator itself.
bool is_private(uintptr_t address);
// Whether it is shared memory of the thread block.
bool is_shared(uintptr_t address);
// Ends the launch; the operator raises RuntimeError. Only the first message counts.
void report(const std::string& message);

void forget_accesses();  // before a launch
void forget_accesses(uintptr_t address, size_t size);

}  // namespace emulation
