// A race detector by CUDA's rules: of the accesses to a byte, if one is a write and not both are
// atomic, a barrier must be between them. Only __syncwarp orders the lanes of a warp, only
// __syncthreads the threads of a block, and nothing the blocks of a launch. Shared memory must be
// written before it is read.
//
// The kernels are compiled with -fsanitize=thread, which calls the functions __tsan_* at every
// access; here they are ours. In a build without it, nothing is checked.
#include <dlfcn.h>

#include <cstdio>
#include <memory>
#include <unordered_map>

#include "emulator.h"

namespace emulation {
namespace {

struct Access {
  Clock clock;
  bool happened = false;
  bool atomic = false;
};

// Of one byte. Some of many reads are forgotten.
struct History {
  static constexpr unsigned kReads = 3;
  Access write;
  Access reads[kReads];
};

class Histories {
 public:
  static constexpr uintptr_t kPage = 1024;

  History& operator[](uintptr_t address) {
    uintptr_t page = address / kPage;
    Recent& recent = recent_[page % kRecent];
    if (recent.page != page || !recent.histories) {
      auto& histories = pages_[page];
      if (!histories) histories.reset(new History[kPage]);
      recent = {page, histories.get()};
    }
    return recent.histories[address % kPage];
  }
  void clear() {
    pages_.clear();
    for (Recent& recent : recent_) recent = {};
  }

 private:
  static constexpr uintptr_t kRecent = 256;
  struct Recent {
    uintptr_t page = 0;
    History* histories = nullptr;
  };
  std::unordered_map<uintptr_t, std::unique_ptr<History[]>> pages_;
  Recent recent_[kRecent];
};

Histories histories;

bool ordered(const Access& earlier, const Access& later) {
  const Clock &a = earlier.clock, &b = later.clock;
  if (!earlier.happened || a.thread == b.thread || (earlier.atomic && later.atomic)) return true;
  if (a.thread / blockDim.x != b.thread / blockDim.x) return false;
  if (a.block_barriers != b.block_barriers) return true;
  return a.thread / kWarpSize == b.thread / kWarpSize && a.warp_barriers != b.warp_barriers;
}

// `code`: where, for addr2line.
std::string in_code(void* code) {
  Dl_info info{};
  dladdr(code, &info);
  char text[32];
  std::snprintf(text, sizeof text, "+%#zx",
                static_cast<char*>(code) - static_cast<char*>(info.dli_fbase));
  return std::string(", in ") + (info.dli_fname ? info.dli_fname : "?") + text;
}

void report_race(const char* kinds, const Access& one, const Access& other, void* code) {
  auto name = [](const Access& access) {
    return std::to_string(access.clock.thread % blockDim.x) + " of block " +
           std::to_string(access.clock.thread / blockDim.x);
  };
  report(std::string("race, ") + kinds + ": threads " + name(one) + " and " + name(other) +
         in_code(code));
}

void record_byte(uintptr_t address, bool write, const Access& access, void* code) {
  History& history = histories[address];
  if (!ordered(history.write, access)) {
    report_race(write ? "write after write" : "read after write", history.write, access, code);
  }
  if (!write) {
    if (!history.write.happened && is_shared(address)) {
      report("shared memory is read before it is written" + in_code(code));
    }
    unsigned slot = 0;
    for (; slot + 1 < History::kReads; ++slot) {
      const Access& read = history.reads[slot];
      if (!read.happened || read.clock.thread == access.clock.thread) break;
    }
    history.reads[slot] = access;
    return;
  }
  for (Access& read : history.reads) {
    if (!ordered(read, access)) report_race("write after read", read, access, code);
    read.happened = false;
  }
  history.write = access;
}

[[maybe_unused]] void record(const void* memory, size_t size, bool write, void* code,
                             bool atomic = false) {
  uintptr_t address = reinterpret_cast<uintptr_t>(memory);
  if (!in_kernel() || is_private(address)) return;
  Access access{clock_of_thread(), true, atomic};
  for (size_t i = 0; i < size; ++i) record_byte(address + i, write, access, code);
}

}  // namespace

void forget_accesses() { histories.clear(); }

#ifndef EMULATION_RACES

void forget_accesses(uintptr_t, size_t) {}
void atomic_access(void*, size_t) {}

}  // namespace emulation

#else

void forget_accesses(uintptr_t address, size_t size) {
  for (size_t i = 0; i < size; ++i) histories[address + i] = History{};
}

void atomic_access(void* address, size_t size) {
  record(address, size, true, __builtin_return_address(0), true);
}

}  // namespace emulation

#include "accesses.h"

#endif
