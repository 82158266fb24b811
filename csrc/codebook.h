// codebook_encode and codebook_decode: their arguments, and their checks.
#pragma once

#include "groups.h"

namespace hvd_compress {

struct Codebook {
  const float* scale;
  const float* book;
  const int64_t* kind;
  Groups groups;
  int64_t size;  // number of values
  int64_t kinds;
  int bits;

  HVD_BODY const float* levels(int64_t row) const { return book + (row << bits); }
};

HVD_BODY float midpoint(const float* levels, int i) { return (levels[i] + levels[i + 1]) * 0.5f; }

// The code of a value that is divided by the scale.
HVD_BODY int nearest(const float* levels, int bits, float scaled) {
  int code = 0;
  for (int half = 1 << (bits - 1); half > 0; half /= 2) {
    if (midpoint(levels, code + half - 1) < scaled) code += half;
  }
  return code;
}

inline Codebook checked(const Tensor& values, const Tensor& scale, const Tensor& edges,
                        const Tensor& book, const Tensor& kind, const Tensor& codes, int64_t bits) {
  Groups groups = check_groups(edges, values);
  check_each(scale, "scale", ScalarType::Float, groups, values);
  check_each(kind, "kind", ScalarType::Long, groups, values);
  check_range("bits", 1, bits, 8);
  check_flat(book, "book", ScalarType::Float, values);
  STD_TORCH_CHECK(book.dim() == 2 && book.size(1) == int64_t{1} << bits,
                  "book must be of shape (kinds, ", int64_t{1} << bits, ")");
  STD_TORCH_CHECK(book.size(0) > 0 || groups.count == 0, "book must have at least one row");
  check_codes(codes, bits, values);
  return {const_data<float>(scale),
          const_data<float>(book),
          const_data<int64_t>(kind),
          groups,
          values.numel(),
          book.size(0),
          static_cast<int>(bits)};
}

}  // namespace hvd_compress
