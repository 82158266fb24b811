// Blocks, their slots, and random numbers: shared by all operators and both back ends.
#pragma once

#include <cstdint>
#include <cstring>

// Always inlined, because a CPU body is compiled for the instruction set of the calling function.
#if defined(__CUDACC__)
#define HVD_BODY __host__ __device__ __forceinline__
#else
#define HVD_BODY inline __attribute__((always_inline))
#endif
// For lambdas, which do not inherit HVD_BODY from the enclosing function.
#define HVD_INLINE __attribute__((always_inline))

namespace hvd_compress {

constexpr int kBlock = 256;
// From here on a gradient counts as infinite: its square overflows.
constexpr float kOverflow = 0x1p64f;
// A coefficient of a block is at most so many times its largest magnitude.
constexpr float kGain = 16.0f;

template <typename To, typename From>
HVD_BODY To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}

HVD_BODY bool is_finite(float value) {
  return (bits_as<uint32_t>(value) & 0x7fffffffu) < 0x7f800000u;
}

// A 32-bit hash: two multiply-xorshift rounds.
HVD_BODY uint32_t mix(uint32_t value, uint32_t key) {
  value = value * 0x9E3779B1u + key;
  value = (value ^ (value >> 16)) * 0x21F0AAADu;
  value = (value ^ (value >> 15)) * 0x735A2D97u;
  return value ^ (value >> 15);
}

// A draw from an exponential distribution (in units of ln 2). All steps are exact or rounded by
// IEEE 754, so that all back ends agree.
HVD_BODY float exponential(uint32_t bits) {
  float uniform = (static_cast<float>(static_cast<int32_t>(bits >> 9)) + 0.5f) * 0x1p-23f;
  int32_t word = bits_as<int32_t>(uniform);
  float exponent = static_cast<float>(127 - (word >> 23));
  float part = bits_as<float>((word & 0x7FFFFF) | 0x3F800000) - 1.0f;
  float draw = exponent - (part + (part * (1.0f - part)) * 0.3466f);
  return draw < 1e-6f ? 1e-6f : draw;
}

// The remainder as in Python: 0 <= result < divisor.
HVD_BODY int64_t modulo(int64_t value, int64_t divisor) {
  int64_t rest = value % divisor;
  return rest < 0 ? rest + divisor : rest;
}

// The first slot of a block within its piece. `shift` is the phase modulo blocks.
HVD_BODY int64_t slot_start(int64_t block, int64_t slots, int64_t blocks, int64_t shift) {
  return (block * slots + shift) / blocks;
}

// The number of the bucket's slots before `slot` that belong to the rank at `position`.
HVD_BODY int64_t slots_before(int64_t slot, int64_t run, int64_t ranks, int64_t position) {
  int64_t turn = run * ranks;
  int64_t whole = slot / turn;
  int64_t rest = slot - whole * turn - position * run;
  return whole * run + (rest < 0 ? 0 : rest > run ? run : rest);
}

}  // namespace hvd_compress
