// Codes of up to 4 bits with AVX2 intrinsics: their packing, and look-up tables of up to 16 floats
// in registers. For processors with AVX-512: wide.h, permute.h.
#pragma once

#include "../pack.h"
#include "isa.h"

namespace hvd_compress {

constexpr int kNarrowBits = 4;  // at most

}  // namespace hvd_compress

#ifdef HVD_V3
#include <immintrin.h>

#define HVD_V3_BODY HVD_V3 inline __attribute__((always_inline))

namespace hvd_compress {

HVD_V3_BODY __m256i load_bytes(const void* memory) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(memory));
}

HVD_V3_BODY void store_bytes(void* memory, __m256i bytes) {
  _mm256_storeu_si256(static_cast<__m256i*>(memory), bytes);
}

// A table of 16 floats, of which kSize are used. Indices are below kSize.
template <int kSize>
struct NarrowTable {
  __m256 low, high;

  HVD_V3_BODY explicit NarrowTable(const float* memory)
      : low(_mm256_loadu_ps(memory)), high(_mm256_loadu_ps(memory + 8)) {}

  HVD_V3_BODY __m256 at(__m256i index) const {
    __m256 first = _mm256_permutevar8x32_ps(low, index);
    if constexpr (kSize <= 8) return first;
    // The bit of 8 as a sign.
    __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
    return _mm256_blendv_ps(first, _mm256_permutevar8x32_ps(high, index), upper);
  }
};

// Writes the codes and errors of 32 values. tree: see Row in codebook.cpp.
template <int kBits>
struct NarrowEncoder {
  __m256 first, last;  // nodes 0 to 7, and 8 to 15
  NarrowTable<1 << kBits> levels;
  __m256 step, inverse;

  HVD_V3_BODY NarrowEncoder(const float* tree, const float* levels, float step)
      : first(_mm256_loadu_ps(tree)),
        last(_mm256_loadu_ps(tree + 8)),
        levels(levels),
        step(_mm256_set1_ps(step)),
        inverse(_mm256_set1_ps(1.0f / step)) {}

  HVD_V3_BODY void operator()(const float* values, float* error, uint8_t* digits) const {
    constexpr int kVectors = 4;
    __m256 scaled[kVectors];
    __m256i code[kVectors];
    for (int k = 0; k < kVectors; ++k) {
      scaled[k] = _mm256_mul_ps(_mm256_loadu_ps(values + 8 * k), inverse);
      code[k] = _mm256_set1_epi32(1);
    }
    for (int depth = 0; depth < kBits; ++depth) {
      for (int k = 0; k < kVectors; ++k) {
        __m256 middle = _mm256_permutevar8x32_ps(depth < 3 ? first : last, code[k]);
        __m256i above = _mm256_castps_si256(_mm256_cmp_ps(middle, scaled[k], _CMP_LT_OQ));
        code[k] = _mm256_sub_epi32(_mm256_add_epi32(code[k], code[k]), above);  // above is -1 or 0
      }
    }
    for (int k = 0; k < kVectors; ++k) {
      code[k] = _mm256_sub_epi32(code[k], _mm256_set1_epi32(1 << kBits));
      __m256 decoded = _mm256_mul_ps(levels.at(code[k]), step);
      __m256 value = _mm256_loadu_ps(values + 8 * k);
      _mm256_storeu_ps(error + 8 * k, _mm256_sub_ps(value, decoded));
    }
    // Packing works in halves of a register: puts them in order.
    __m256i halves = _mm256_packs_epi32(code[0], code[1]),
            more = _mm256_packs_epi32(code[2], code[3]);
    __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    store_bytes(digits, _mm256_permutevar8x32_epi32(_mm256_packus_epi16(halves, more), order));
  }
};

template <int kBits>
HVD_V3 void narrow_encode(const float* tree, const float* levels, float step, const float* values,
                          float* error, uint8_t* digits, int count) {
  NarrowEncoder<kBits> encode(tree, levels, step);
  int i = 0;
  for (; i + 32 <= count; i += 32) encode(values + i, error + i, digits + i);
  if (i < count) {
    float given[32] = {}, errors[32];
    uint8_t codes[32];
    memcpy(given, values + i, (count - i) * sizeof(float));
    encode(given, errors, codes);
    memcpy(error + i, errors, (count - i) * sizeof(float));
    memcpy(digits + i, codes, count - i);
  }
}

template <int kBits>
HVD_V3 void narrow_decode(const float* levels, float step, const uint32_t* digits, float* values,
                          int count, bool add) {
  NarrowTable<1 << kBits> table(levels);
  __m256 factor = _mm256_set1_ps(step);
  int i = 0;
  for (; i + 8 <= count; i += 8) {
    __m256 value = _mm256_mul_ps(table.at(load_bytes(digits + i)), factor);
    if (add) value = _mm256_add_ps(_mm256_loadu_ps(values + i), value);
    _mm256_storeu_ps(values + i, value);
  }
  for (; i < count; ++i) {
    float value = levels[digits[i]] * step;
    values[i] = add ? values[i] + value : value;
  }
}

// Packs the codes of a chunk of kCount values, and unpacks them. Not inlined: see codebook.cpp.
template <int kBits, int kCount>
class Narrow {
  static_assert(kBits <= kNarrowBits && kCount % 32 == 0);

 public:
  explicit Narrow(int) {}

  // Writes up to 8 - kBits bytes beyond the last code.
  HVD_V3 void pack(const uint8_t* digits, uint8_t* codes) const {
    // Joins neighbours in fields of twice as many bits: bytes, words, double words.
    __m256i bytes = _mm256_set1_epi16(1 | 1 << (8 + kBits));
    __m256i words = _mm256_set1_epi32(1 | 1 << (16 + 2 * kBits));
    for (int i = 0; i < kCount; i += 32, codes += 4 * kBits) {
      __m256i pairs = _mm256_maddubs_epi16(load_bytes(digits + i), bytes);
      __m256i fours = _mm256_madd_epi16(pairs, words);
      __m256i units = _mm256_or_si256(fours, _mm256_srli_epi64(fours, 32 - 4 * kBits));
      uint64_t unit[4];
      store_bytes(unit, units);
      for (int k = 0; k < 4; ++k) memcpy(codes + k * kBits, unit + k, sizeof(uint64_t));
    }
  }

  HVD_V3 void unpack(const uint8_t* codes, int units, uint32_t* digits) const {
    uint8_t packed[kCount / 8 * kBits + sizeof(uint32_t)];
    memcpy(packed, codes, units * kBits);
    __m256i places =
        _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(kBits));
    __m256i mask = _mm256_set1_epi32((1 << kBits) - 1);
    for (int i = 0; i < units; ++i) {
      int32_t unit;
      memcpy(&unit, packed + i * kBits, sizeof(unit));
      __m256i fields = _mm256_srlv_epi32(_mm256_set1_epi32(unit), places);
      store_bytes(digits + 8 * i, _mm256_and_si256(fields, mask));
    }
  }
};

}  // namespace hvd_compress
#endif
