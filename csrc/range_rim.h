// The arguments of range_encode and range_decode, checked: the same on every device.
#pragma once

#include "codes_rim.h"
#include "range.h"

namespace hvd_compress {

inline Range checked(const Tensor& values, const Tensor& base, const Tensor& edges,
                     const Tensor& codes, int64_t bits, int64_t mantissa, int64_t positive) {
  Groups groups = check_groups(edges, values);
  check_each(base, "base", ScalarType::Long, groups, values);
  check_range("bits", 4, bits, 16);
  check_range("mantissa", 1, mantissa, 22);
  check_range("positive", 1, positive, (int64_t{1} << bits) - 2);
  check_codes(codes, bits, values);
  return {const_data<int64_t>(base),
          groups,
          values.numel(),
          static_cast<int>(bits),
          static_cast<int>(23 - mantissa),
          static_cast<uint32_t>(positive)};
}

}  // namespace hvd_compress
