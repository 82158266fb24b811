// Codes of more than 4 bits: the range of the midpoints is divided into equal cells with at most
// one midpoint each, so that a value's cell and one comparison give its code.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "../codebook.h"
#include "codes.h"
#include "narrow.h"

namespace hvd_compress {

struct alignas(16) Cell {
  float middle;        // the first midpoint in this or a later cell, or else the last one
  float lower, upper;  // the levels around it
  int32_t code;        // of `lower`
};

class Cells {
 public:
  Cells(const float* levels, int bits) : levels_(levels), bits_(bits) {
    int last_middle = (1 << bits) - 2;
    first_ = midpoint(levels, 0);
    float span = midpoint(levels, last_middle) - first_, narrowest = span;
    for (int k = 1; k <= last_middle; ++k) {
      narrowest = std::min(narrowest, midpoint(levels, k) - midpoint(levels, k - 1));
    }
    constexpr float kMost = 2048;
    constexpr float kMargin = 1.01f;  // for rounding
    last_ = std::floor(std::min(kMost, kMargin * span / narrowest + 1));
    density_ = last_ / span;
    cells_.resize(static_cast<size_t>(last_) + 1);
    int filled = 0;
    for (int k = 0; k <= last_middle; ++k) {
      int cell = find(midpoint(levels, k));
      usable_ &= filled <= cell;  // else the cell contains another midpoint
      while (filled <= cell) cells_[filled++] = {midpoint(levels, k), levels[k], levels[k + 1], k};
    }
    std::fill(cells_.begin() + filled, cells_.end(), cells_[filled - 1]);
  }

  // False if the levels are too uneven for a small table: then each code takes a binary search, 15
  // to 30 times as long. Those of codebook() are even enough.
  bool usable() const { return usable_; }
  const Cell* data() const { return cells_.data(); }

  // The value's cell: not lower for a larger value; 0 for a NaN.
  HVD_BODY int find(float scaled) const {
    float place = (scaled - first_) * density_;
    place = place > 0 ? place : 0;
    return static_cast<int>(place < last_ ? place : last_);
  }

#ifdef HVD_V3
  HVD_V3_BODY __m256i find(__m256 scaled) const {
    __m256 place =
        _mm256_mul_ps(_mm256_sub_ps(scaled, _mm256_set1_ps(first_)), _mm256_set1_ps(density_));
    place = _mm256_max_ps(place, _mm256_setzero_ps());  // 0 for a NaN
    return _mm256_cvttps_epi32(_mm256_min_ps(place, _mm256_set1_ps(last_)));
  }
#endif

  HVD_BODY int code(float scaled) const {
    if (!usable_) return nearest(levels_, bits_, scaled);
    const Cell& cell = cells_[find(scaled)];
    return cell.code + (cell.middle < scaled);
  }

 private:
  const float* levels_;
  int bits_;
  float first_, last_, density_;
  std::vector<Cell> cells_;
  bool usable_ = true;
};

#ifdef HVD_V3
// Four numbers of two cells, in the halves of a register.
HVD_V3_BODY __m256 load_cells(const float* first, const float* second) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_load_ps(first)), _mm_load_ps(second), 1);
}

// The lower (or upper) halves of each 128 bits of both.
HVD_V3_BODY __m256 lower_pairs(__m256 a, __m256 b) {
  return _mm256_castpd_ps(_mm256_unpacklo_pd(_mm256_castps_pd(a), _mm256_castps_pd(b)));
}

HVD_V3_BODY __m256 upper_pairs(__m256 a, __m256 b) {
  return _mm256_castpd_ps(_mm256_unpackhi_pd(_mm256_castps_pd(a), _mm256_castps_pd(b)));
}

// For up to kChunk values. Loads and transposes cells, which is faster than gather instructions.
HVD_V3 inline void cells_encode(const Cells& cells, const float* levels, float step,
                                const float* values, float* error, uint8_t* digits, int count) {
  const float* memory = &cells.data()->middle;
  float inverse = 1.0f / step;
  uint32_t found[kChunk];  // first the place of the cell, then the code
  for (int i = 0; i + 8 <= count; i += 8) {
    __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(values + i), _mm256_set1_ps(inverse));
    store_bytes(found + i, _mm256_slli_epi32(cells.find(scaled), 2));
  }
  int i = 0;
  for (; i + 8 <= count; i += 8) {
    const uint32_t* place = found + i;
    __m256 a = load_cells(memory + place[0], memory + place[4]);
    __m256 b = load_cells(memory + place[1], memory + place[5]);
    __m256 c = load_cells(memory + place[2], memory + place[6]);
    __m256 d = load_cells(memory + place[3], memory + place[7]);
    __m256 ab = _mm256_unpacklo_ps(a, b), cd = _mm256_unpacklo_ps(c, d);
    __m256 middle = lower_pairs(ab, cd), lower = upper_pairs(ab, cd);
    ab = _mm256_unpackhi_ps(a, b), cd = _mm256_unpackhi_ps(c, d);
    __m256 upper = lower_pairs(ab, cd), code = upper_pairs(ab, cd);
    __m256 value = _mm256_loadu_ps(values + i);
    __m256 scaled = _mm256_mul_ps(value, _mm256_set1_ps(inverse));
    __m256 above = _mm256_cmp_ps(middle, scaled, _CMP_LT_OQ);  // -1 or 0
    __m256 level = _mm256_blendv_ps(lower, upper, above);
    __m256 decoded = _mm256_mul_ps(level, _mm256_set1_ps(step));
    _mm256_storeu_ps(error + i, _mm256_sub_ps(value, decoded));
    store_bytes(found + i, _mm256_sub_epi32(_mm256_castps_si256(code), _mm256_castps_si256(above)));
  }
  for (; i < count; ++i) {
    found[i] = cells.code(values[i] * inverse);
    error[i] = values[i] - levels[found[i]] * step;
  }
  for (int k = 0; k < count; ++k) digits[k] = static_cast<uint8_t>(found[k]);
}

// Loads single levels, which is faster than gather instructions.
HVD_V3_BODY __m256 load_levels(const float* levels, uint64_t digits) {
  auto level = [&](int k) HVD_INLINE { return levels[static_cast<uint8_t>(digits >> (8 * k))]; };
  return _mm256_setr_ps(level(0), level(1), level(2), level(3), level(4), level(5), level(6),
                        level(7));
}

HVD_V3 inline void levels_decode(const float* levels, float step, const uint8_t* digits,
                                 float* values, int count, bool add) {
  int i = 0;
  for (; i + 8 <= count; i += 8) {
    __m256 level = load_levels(levels, load_word(digits + i));
    __m256 value = _mm256_mul_ps(level, _mm256_set1_ps(step));
    if (add) value = _mm256_add_ps(_mm256_loadu_ps(values + i), value);
    _mm256_storeu_ps(values + i, value);
  }
  for (; i < count; ++i) {
    float value = levels[digits[i]] * step;
    values[i] = add ? values[i] + value : value;
  }
}
#endif

}  // namespace hvd_compress
