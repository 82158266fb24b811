// Counts the memory accesses of an emulated kernel by warp, in place of tests/emulation/races.cpp.
// Used by kernel_model.py. A request is the n-th access of a warp's lanes in one place of the code;
// for global memory, its sectors are the pieces of 32 bytes that it touches, and for shared memory,
// the accesses to the bank that has the most.
#include <array>
#include <map>
#include <set>
#include <tuple>
#include <unordered_map>

#include "emulator.h"

extern "C" void* __libc_stack_end;  // of the main thread, whose arguments kernels read

namespace emulation {
namespace {

using Place = std::tuple<uint32_t, void*, uint32_t>;  // warp, code, number

std::map<std::pair<uint32_t, void*>, uint32_t> numbers;  // of accesses, by thread and code
std::map<Place, std::set<uintptr_t>> requests[3];        // loads, stores, shared memory

void record(const void* memory, size_t size, bool write, void* code) {
  uintptr_t address = reinterpret_cast<uintptr_t>(memory);
  bool host_stack = reinterpret_cast<uintptr_t>(__libc_stack_end) - address < uintptr_t{8} << 20;
  if (!in_kernel() || is_private(address) || host_stack) return;
  uint32_t thread = clock_of_thread().thread;
  bool shared = is_shared(address);
  Place place{thread / kWarpSize, code, numbers[{thread, code}]++};
  uintptr_t piece = shared ? 4 : 32;
  for (uintptr_t i = address / piece; i <= (address + size - 1) / piece; ++i) {
    requests[shared ? 2 : write][place].insert(i);
  }
}

}  // namespace

void forget_accesses() { numbers.clear(); }
void forget_accesses(uintptr_t, size_t) {}
void atomic_access(void*, size_t) {}

}  // namespace emulation

// Writes the requests and sectors of loads, stores and shared memory since the last call.
extern "C" __attribute__((visibility("default"))) void emulation_requests(uint64_t* to) {
  for (int kind = 0; kind < 3; ++kind) {
    to[2 * kind] = emulation::requests[kind].size();
    to[2 * kind + 1] = 0;
    for (const auto& [place, pieces] : emulation::requests[kind]) {
      std::array<uint64_t, 32> banks{};
      for (uintptr_t piece : pieces) ++banks[piece % 32];
      to[2 * kind + 1] += kind < 2 ? pieces.size() : *std::max_element(banks.begin(), banks.end());
    }
    emulation::requests[kind].clear();
  }
}

#include "accesses.h"
