// Look-up tables of up to 128 floats in AVX-512 registers, read by permutations, 16 entries at a
// time: several times as fast as gather instructions.
#pragma once

#include "wide.h"

#ifdef HVD_V4
#include <immintrin.h>

namespace hvd_compress {

// A table of kSize floats. Indices are taken modulo the size of its registers.
template <int kSize>
struct Table {
  static constexpr int kRegisters = kSize < 16 ? 1 : kSize / 16;
  __m512 parts[kRegisters];

  HVD_V4_BODY explicit Table(const float* memory) {
    for (int i = 0; i < kRegisters; ++i) parts[i] = _mm512_load_ps(memory + 16 * i);
  }

  template <int kFirst = 0, int kCount = kRegisters>
  HVD_V4_BODY __m512 at(__m512i index) const {
    if constexpr (kCount == 1) {
      return _mm512_maskz_permutexvar_ps(kAll, index, parts[kFirst]);
    } else if constexpr (kCount == 2) {
      return _mm512_permutex2var_ps(parts[kFirst], index, parts[kFirst + 1]);
    } else {
      __mmask16 upper = _mm512_test_epi32_mask(index, _mm512_set1_epi32(kCount * 8));
      return _mm512_mask_blend_ps(upper, at<kFirst, kCount / 2>(index),
                                  at<kFirst + kCount / 2, kCount / 2>(index));
    }
  }
};

constexpr int kTogether = 4;  // vectors in flight, because the steps of one depend on one another

// For up to 4 bits: the tree (see Row in codebook.cpp) and the levels are in one register each.
template <int kBits>
HVD_V4 void permute_encode(const float* tree, const float* levels, float step, const float* values,
                           float* error, uint8_t* digits, int count) {
  Table<1 << kBits> nodes(tree), table(levels);
  __m512 inverse = _mm512_set1_ps(1.0f / step);
  __m512i one = _mm512_set1_epi32(1);
  for (int i = 0; i < count; i += 16 * kTogether) {
    __m512 scaled[kTogether];
    __m512i code[kTogether];
    for (int k = 0; k < kTogether; ++k) {
      scaled[k] = _mm512_mul_ps(load_floats(values + i + 16 * k, count - i - 16 * k), inverse);
      code[k] = one;
    }
    for (int depth = 0; depth < kBits; ++depth) {
      for (int k = 0; k < kTogether; ++k) {
        __mmask16 above = _mm512_cmp_ps_mask(nodes.at(code[k]), scaled[k], _CMP_LT_OQ);
        code[k] = _mm512_add_epi32(code[k], code[k]);
        code[k] = _mm512_mask_add_epi32(code[k], above, code[k], one);
      }
    }
    for (int k = 0; k < kTogether; ++k) {
      int first = i + 16 * k;
      code[k] = _mm512_sub_epi32(code[k], _mm512_set1_epi32(1 << kBits));
      store_digits(digits + first, code[k], count - first);
      __m512 decoded = _mm512_mul_ps(table.at(code[k]), _mm512_set1_ps(step));
      __m512 value = load_floats(values + first, count - first);
      store_floats(error + first, _mm512_sub_ps(value, decoded), count - first);
    }
  }
}

template <int kBits>
HVD_V4 void permute_decode(const float* levels, float step, const uint16_t* digits, float* values,
                           int count, bool add) {
  Table<1 << kBits> table(levels);
  for (int i = 0; i < count; i += 16) {
    __m512i code = load_digits(digits + i, count - i);
    __m512 value = _mm512_mul_ps(table.at(code), _mm512_set1_ps(step));
    if (add) value = _mm512_add_ps(load_floats(values + i, count - i), value);
    store_floats(values + i, value, count - i);
  }
}

}  // namespace hvd_compress
#endif
