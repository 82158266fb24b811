// Codes of a codebook: the arguments of the operators on them, and their checks.
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

// The errors may take the place of the values, entry by entry.
inline void check_error(const std::optional<Tensor>& error, const Tensor& values) {
  if (!error) return;
  if (error->data_ptr() != values.data_ptr()) return check_quantization_error(*error, values);
  check_flat(*error, "quantization_error", ScalarType::Float, values);
  check_numel(*error, "quantization_error", values.numel());
}

HVD_BODY float midpoint(const float* levels, int i) { return (levels[i] + levels[i + 1]) * 0.5f; }

// The code of a value that is divided by the scale.
HVD_BODY int nearest(const float* levels, int bits, float scaled) {
  int code = 0;
  for (int half = 1 << (bits - 1); half > 0; half /= 2) {
    if (midpoint(levels, code + half - 1) < scaled) code += half;
  }
  return code;
}

// For `size` values of each of several ranks, which have scales and kinds of their own.
inline Codebook checked(int64_t size, const Tensor& scale, const Tensor& edges, const Tensor& book,
                        const Tensor& kind, int64_t bits, const Tensor& other, int64_t ranks = 1) {
  Groups groups = check_groups(edges, size, other);
  check_flat(scale, "scale", ScalarType::Float, other);
  check_numel(scale, "scale", ranks * groups.count);
  check_flat(kind, "kind", ScalarType::Long, other);
  check_numel(kind, "kind", ranks * groups.count);
  check_range("bits", 1, bits, 8);
  check_flat(book, "book", ScalarType::Float, other);
  STD_TORCH_CHECK(book.dim() == 2 && book.size(1) == int64_t{1} << bits,
                  "book must be of shape (kinds, ", int64_t{1} << bits, ")");
  STD_TORCH_CHECK(book.size(0) > 0 || groups.count == 0, "book must have at least one row");
  return {const_data<float>(scale),
          const_data<float>(book),
          const_data<int64_t>(kind),
          groups,
          size,
          book.size(0),
          static_cast<int>(bits)};
}

inline Codebook checked(const Tensor& values, const Tensor& scale, const Tensor& edges,
                        const Tensor& book, const Tensor& kind, const Tensor& codes, int64_t bits) {
  check_flat(values, "values", ScalarType::Float, values);
  Codebook args = checked(values.numel(), scale, edges, book, kind, bits, values);
  check_codes(codes, bits, values);
  return args;
}

}  // namespace hvd_compress
