// Look-up tables of up to 256 floats in AVX-512 registers, read by permutations, 16 entries at a
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

// The nodes of depths 0 to 3 are in one register; each further depth has its own.
template <int kDepth, int kBits>
struct Descent {
  Table<1 << kDepth> table;
  Descent<kDepth + 1, kBits> further;

  HVD_V4_BODY explicit Descent(const float* tree)
      : table(tree + (kDepth < 4 ? 0 : 1 << kDepth)), further(tree) {}

  HVD_V4_BODY void operator()(const __m512 (&scaled)[kTogether], __m512i (&node)[kTogether]) const {
    __m512i one = _mm512_set1_epi32(1);
    __mmask16 above[kTogether];
    for (int k = 0; k < kTogether; ++k) {
      above[k] = _mm512_cmp_ps_mask(table.at(node[k]), scaled[k], _CMP_LT_OQ);
    }
    for (int k = 0; k < kTogether; ++k) {
      node[k] = _mm512_add_epi32(node[k], node[k]);
      node[k] = _mm512_mask_add_epi32(node[k], above[k], node[k], one);
    }
    further(scaled, node);
  }
};

template <int kBits>
struct Descent<kBits, kBits> {
  HVD_V4_BODY explicit Descent(const float*) {}
  HVD_V4_BODY void operator()(const __m512 (&)[kTogether], __m512i (&)[kTogether]) const {}
};

// Descends to a pair of levels and then chooses one of the two. The midpoints of pairs, half of
// all, are computed instead of looked up.
template <int kBits>
HVD_V4 void permute_encode(const float* tree, const float* lower, const float* upper, float step,
                           const float* values, float* error, uint8_t* digits, int count) {
  constexpr int kPairs = 1 << (kBits - 1);
  __m512 inverse = _mm512_set1_ps(1.0f / step);
  Descent<0, kBits - 1> descend(tree);
  Table<kPairs> lowers(lower), uppers(upper);
  for (int i = 0; i < count; i += 16 * kTogether) {
    __m512 scaled[kTogether];
    __m512i node[kTogether];
    for (int k = 0; k < kTogether; ++k) {
      scaled[k] = _mm512_mul_ps(load_floats(values + i + 16 * k, count - i - 16 * k), inverse);
      node[k] = _mm512_set1_epi32(1);
    }
    descend(scaled, node);
    for (int k = 0; k < kTogether; ++k) {
      int first = i + 16 * k;
      __m512i pair = _mm512_sub_epi32(node[k], _mm512_set1_epi32(kPairs));
      __m512 low = lowers.at(pair), high = uppers.at(pair);
      __m512 middle = _mm512_mul_ps(_mm512_add_ps(low, high), _mm512_set1_ps(0.5f));
      __mmask16 above = _mm512_cmp_ps_mask(middle, scaled[k], _CMP_LT_OQ);
      __m512i code = _mm512_add_epi32(pair, pair);
      code = _mm512_mask_add_epi32(code, above, code, _mm512_set1_epi32(1));
      store_digits(digits + first, code, count - first);
      __m512 decoded = _mm512_mul_ps(_mm512_mask_blend_ps(above, low, high), _mm512_set1_ps(step));
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
