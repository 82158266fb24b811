// The order of what CUDA leaves open.
#pragma once

#include <bit>
#include <cstdint>
#include <cstdlib>

namespace emulation {

class Random {
 public:
  Random() {
    const char* seed = std::getenv("EMULATION_SEED");
    state_ = seed ? std::strtoull(seed, nullptr, 10) * 0x9E3779B97F4A7C15u : 0;
  }
  unsigned below(unsigned limit) {  // 0 if nothing is to be shuffled
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<unsigned>((state_ >> 20) % limit);
  }
  unsigned one_of(uint32_t bits) {
    for (unsigned skip = below(static_cast<unsigned>(std::popcount(bits))); skip; --skip) {
      bits &= bits - 1;
    }
    return static_cast<unsigned>(std::countr_zero(bits));
  }

 private:
  uint64_t state_;
};

}  // namespace emulation
