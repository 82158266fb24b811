// Packing and unpacking of fields with AVX-512 and BMI2 intrinsics.
#pragma once

#include "../pack.h"
#include "isa.h"

#ifdef HVD_V4
#include <immintrin.h>

#define HVD_V4_BODY HVD_V4 inline __attribute__((always_inline))

namespace hvd_compress {

// Loads and stores of up to 16 values. 16 values need no mask, which is faster.
constexpr __mmask16 kAll = 0xFFFF;

HVD_V4_BODY __mmask16 first_lanes(int count) {
  return static_cast<__mmask16>(count >= 16 ? kAll : count <= 0 ? 0 : (1 << count) - 1);
}

HVD_V4_BODY __m512 load_floats(const float* values, int count) {
  return count >= 16 ? _mm512_loadu_ps(values) : _mm512_maskz_loadu_ps(first_lanes(count), values);
}

HVD_V4_BODY void store_floats(float* values, __m512 value, int count) {
  if (count >= 16) {
    _mm512_storeu_ps(values, value);
  } else {
    _mm512_mask_storeu_ps(values, first_lanes(count), value);
  }
}

HVD_V4_BODY __m512i load_digits(const uint16_t* digits, int count) {
  return _mm512_maskz_cvtepu16_epi32(kAll, _mm256_maskz_loadu_epi16(first_lanes(count), digits));
}

HVD_V4_BODY void store_digits(uint8_t* digits, __m512i fields, int count) {
  __m128i bytes = _mm512_maskz_cvtepi32_epi8(kAll, fields);
  if (count >= 16) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(digits), bytes);
  } else {
    _mm_mask_storeu_epi8(digits, first_lanes(count), bytes);
  }
}

HVD_V4_BODY void store_digits(uint16_t* digits, __m512i fields, int) {
  __m256i halves = _mm512_maskz_cvtepi32_epi16(kAll, fields);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(digits), halves);
}

// The positions of 16 fields in 512 bits: field i begins at bit place(i), below 480.
struct Fields {
  alignas(64) uint16_t halves[32];
  alignas(64) uint32_t shifts[16];
  int bits;  // per field, at most 16

  template <typename Place>
  Fields(int bits, const Place& place) : bits(bits) {
    for (int i = 0; i < 16; ++i) {
      halves[2 * i] = static_cast<uint16_t>(place(i) / 16);
      halves[2 * i + 1] = static_cast<uint16_t>(place(i) / 16 + 1);
      shifts[i] = static_cast<uint32_t>(place(i) % 16);
    }
  }
};

// Moves the 32 bits around each field to a lane, and shifts and masks the field.
struct FieldReader {
  __m512i halves;
  __m512i shifts;
  __m512i mask;

  HVD_V4_BODY explicit FieldReader(const Fields& fields)
      : halves(_mm512_load_si512(fields.halves)),
        shifts(_mm512_load_si512(fields.shifts)),
        mask(_mm512_set1_epi32((1 << fields.bits) - 1)) {}

  // Reads the fields `skip` * 16 bits after those of `fields`.
  HVD_V4_BODY __m512i operator()(__m512i memory, int skip = 0) const {
    __m512i place = _mm512_add_epi16(halves, _mm512_set1_epi16(static_cast<int16_t>(skip)));
    __m512i around = _mm512_maskz_permutexvar_epi16(0xFFFFFFFF, place, memory);
    return _mm512_and_si512(_mm512_maskz_srlv_epi32(kAll, around, shifts), mask);
  }
};

// The lowest `bits` bits of every digit of a word.
template <typename Digit>
HVD_BODY uint64_t digit_mask(int bits) {
  constexpr uint64_t kOnes = ~uint64_t{0} / static_cast<Digit>(~Digit{0});
  return low_bits(bits) * kOnes;
}

// pext is fast on processors with AVX-512.
template <typename Digit>
HVD_V4_BODY uint64_t fold_wide(const Digit* digits, uint64_t mask) {
  return _pext_u64(load_word(digits), mask);
}

}  // namespace hvd_compress
#endif
