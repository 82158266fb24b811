// A CUDA device on the CPU. The blocks of a launch run one after the other; the threads of a block
// are fibers, which change at warp operations and barriers.
//
// EMULATION_SEED in the environment shuffles blocks, warps and lanes; without it, or with 0, they
// run in order. The device refuses what is undefined in CUDA: lanes at different operations,
// threads that leave before a barrier, writes beyond shared memory.
#include "emulator.h"

#include <cstdlib>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "random.h"

// Saves the registers that a call preserves on the stack, and continues on another one.
extern "C" void emulation_switch(void** from, void* to);

emulation::Position threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {
namespace {

constexpr size_t kStackSize = 256 * 1024;  // sanitizers need much
constexpr uint32_t kAllLanes = 0xffffffffu;
#ifdef EMULATION_EXACT_MEMORY  // the address sanitizer watches its ends
constexpr size_t kGuard = 0;
#else
constexpr size_t kGuard = 64;
#endif
constexpr int kGarbage = 0xA5;

enum class State : uint8_t { kReady, kAtWarpOperation, kAtBarrier, kDone };

struct Thread {
  void* stack_pointer = nullptr;
  State state = State::kReady;
  const char* operation = nullptr;
  uint32_t line = 0;
  unsigned mask = 0;
  uint64_t value = 0;
};

struct Warp {
  uint32_t ready = kAllLanes;  // lanes that can go on
  uint16_t barriers = 0;
  uint64_t values[kWarpSize];  // of the last operation
};

struct Shared {
  uint32_t line;
  size_t size;
  std::unique_ptr<char[]> memory;

  char* begin() const { return memory.get() + kGuard; }
};

std::mutex one_launch;
Random random_order;
std::unique_ptr<char[]> stacks;
Thread threads[kMaxThreads];
Warp warps[kMaxThreads / kWarpSize];
std::vector<Shared> shared;
const std::function<void()>* thread_body = nullptr;
void* scheduler_stack_pointer = nullptr;
unsigned current = 0;  // thread of the block
uint16_t block_barriers = 0;
bool running = false;
uint64_t blocks_run = 0;
uint64_t launches = 0;
std::string failure;

void to_scheduler() { emulation_switch(&threads[current].stack_pointer, scheduler_stack_pointer); }

[[noreturn]] void fail(const std::string& message) {
  report(message);
  to_scheduler();
  std::abort();
}

void begin_thread() {
  (*thread_body)();
  threads[current].state = State::kDone;
  to_scheduler();
  std::abort();
}

void prepare(unsigned i) {
  uintptr_t top = reinterpret_cast<uintptr_t>(stacks.get() + (i + 1) * kStackSize) & ~uintptr_t{63};
  void** pointer = reinterpret_cast<void**>(top);
  *--pointer = nullptr;  // aligns the stack as after a call
  *--pointer = reinterpret_cast<void*>(&begin_thread);
  for (int saved = 0; saved < 6; ++saved) *--pointer = nullptr;
  threads[i] = Thread{};
  threads[i].stack_pointer = pointer;
}

std::string where(const Thread& thread) {
  switch (thread.state) {
    case State::kDone:
      return "has left";
    case State::kAtBarrier:
      return "is at __syncthreads in line " + std::to_string(thread.line);
    default:
      return std::string("is at ") + thread.operation + " in line " + std::to_string(thread.line);
  }
}

// No lane of the warp can go on. Returns whether all were at one warp operation, and now can.
bool release_warp(unsigned w) {
  Thread* lanes = threads + w * kWarpSize;
  bool waits = false;
  for (unsigned i = 0; i < kWarpSize; ++i) waits |= lanes[i].state == State::kAtWarpOperation;
  if (!waits) return false;
  for (unsigned i = 0; i < kWarpSize; ++i) {
    const Thread &first = lanes[0], &other = lanes[i];
    if (other.state != first.state || other.line != first.line ||
        strcmp(other.operation, first.operation) != 0) {
      report("lanes of a warp are apart: lane 0 " + where(first) + ", lane " + std::to_string(i) +
             " " + where(other));
      return false;
    }
    if (other.mask != kAllLanes) {
      report("a mask is not full: " + where(other));
      return false;
    }
  }
  for (unsigned i = 0; i < kWarpSize; ++i) {
    warps[w].values[i] = lanes[i].value;
    lanes[i].state = State::kReady;
  }
  if (strcmp(lanes[0].operation, "__syncwarp") == 0) ++warps[w].barriers;
  warps[w].ready = kAllLanes;
  return true;
}

// No thread can go on. Returns whether all were at one barrier, and now can.
bool release_block() {
  unsigned count = blockDim.x, done = 0;
  for (unsigned i = 0; i < count; ++i) done += threads[i].state == State::kDone;
  if (done == count) return false;
  for (unsigned i = 0; i < count; ++i) {
    if (threads[i].state != State::kAtBarrier || threads[i].line != threads[0].line) {
      report("threads of a block are apart: thread 0 " + where(threads[0]) + ", thread " +
             std::to_string(i) + " " + where(threads[i]));
      return false;
    }
  }
  for (unsigned i = 0; i < count; ++i) threads[i].state = State::kReady;
  for (unsigned w = 0; w < count / kWarpSize; ++w) warps[w].ready = kAllLanes;
  ++block_barriers;
  return true;
}

void check_guards() {
  for (const Shared& array : shared) {
    for (size_t i = 0; i < kGuard; ++i) {
      if (array.begin()[-1 - static_cast<ptrdiff_t>(i)] != static_cast<char>(kGarbage) ||
          array.begin()[array.size + i] != static_cast<char>(kGarbage)) {
        report("the shared memory of line " + std::to_string(array.line) + " was written outside");
        return;
      }
    }
  }
}

void run_block() {
  unsigned count = blockDim.x / kWarpSize;
  for (unsigned i = 0; i < blockDim.x; ++i) prepare(i);
  for (unsigned w = 0; w < count; ++w) warps[w] = Warp{};
  block_barriers = 0;
  shared.clear();
  uint32_t all = kAllLanes >> (kWarpSize - count), ready = all;
  while (failure.empty()) {
    unsigned w = random_order.one_of(ready);
    unsigned lane = random_order.one_of(warps[w].ready);
    warps[w].ready &= ~(1u << lane);
    current = w * kWarpSize + lane;
    threadIdx.x = current;
    running = true;
    emulation_switch(&scheduler_stack_pointer, threads[current].stack_pointer);
    running = false;
    if (!warps[w].ready && !release_warp(w)) ready &= ~(1u << w);
    if (!ready) {
      if (!release_block()) break;
      ready = all;
    }
  }
  check_guards();
  ++blocks_run;
}

}  // namespace

unsigned lane() { return current % kWarpSize; }

const uint64_t* meet(const char* operation, unsigned mask, uint64_t value, Site site) {
  threads[current] = {
      threads[current].stack_pointer, State::kAtWarpOperation, operation, site.line(), mask, value};
  to_scheduler();
  return warps[current / kWarpSize].values;
}

void barrier(Site site) {
  threads[current].state = State::kAtBarrier;
  threads[current].line = site.line();
  to_scheduler();
}

void* shared_memory(size_t size, Site site) {
  for (const Shared& array : shared) {
    if (array.line == site.line()) return array.begin();
  }
  shared.push_back({site.line(), size, std::make_unique<char[]>(size + 2 * kGuard)});
  Shared& array = shared.back();
  memset(array.memory.get(), kGarbage, size + 2 * kGuard);
  forget_accesses(reinterpret_cast<uintptr_t>(array.begin()), size);
  return array.begin();
}

void launch(unsigned grid, unsigned block, const std::function<void()>& thread) {
  std::lock_guard<std::mutex> lock(one_launch);
  if (grid == 0 || grid > 0x7fffffffu || block == 0 || block > kMaxThreads || block % kWarpSize) {
    throw std::runtime_error("CUDA error: invalid configuration argument");
  }
  if (!stacks) stacks = std::make_unique_for_overwrite<char[]>(kMaxThreads * kStackSize);
  thread_body = &thread;
  gridDim.x = grid;
  blockDim.x = block;
  std::vector<unsigned> order(grid);
  std::iota(order.begin(), order.end(), 0u);
  for (unsigned i = 0; i + 1 < grid; ++i) {
    std::swap(order[i], order[i + random_order.below(grid - i)]);
  }
  failure.clear();
  forget_accesses();
  ++launches;
  for (unsigned number : order) {
    blockIdx.x = number;
    run_block();
    if (!failure.empty()) {
      stacks.reset();  // threads were abandoned on them
      throw std::runtime_error("emulated CUDA: " + failure);
    }
  }
}

bool in_kernel() { return running; }

Clock clock_of_thread() {
  return {blockIdx.x * blockDim.x + current, block_barriers, warps[current / kWarpSize].barriers};
}

bool is_private(uintptr_t address) {
  auto within = [&](const void* memory, size_t size) {
    return address - reinterpret_cast<uintptr_t>(memory) < size;
  };
  return within(stacks.get(), kMaxThreads * kStackSize) || within(warps, sizeof(warps)) ||
         within(&threadIdx, sizeof(threadIdx)) || within(&blockIdx, sizeof(blockIdx)) ||
         within(&blockDim, sizeof(blockDim)) || within(&gridDim, sizeof(gridDim));
}

bool is_shared(uintptr_t address) {
  for (const Shared& array : shared) {
    if (address - reinterpret_cast<uintptr_t>(array.begin()) < array.size) return true;
  }
  return false;
}

void report(const std::string& message) {
  if (failure.empty()) failure = message + ", block " + std::to_string(blockIdx.x);
}

}  // namespace emulation

// The number of launches, and of thread blocks that have run, so far.
extern "C" __attribute__((visibility("default"))) uint64_t emulation_launches() {
  return emulation::launches;
}

extern "C" __attribute__((visibility("default"))) uint64_t emulation_blocks() {
  return emulation::blocks_run;
}
