// The arguments of lanes_encode and lanes_decode, checked: the same on every device.
#pragma once

#include "codes_rim.h"
#include "lanes.h"

namespace hvd_compress {

inline Lanes checked(const Tensor& values, const Tensor& scale, const Tensor& edges,
                     const Tensor& words, int64_t bits, int64_t width, int64_t key, double factor) {
  Groups groups = check_groups(edges, values);
  check_each(scale, "scale", ScalarType::Float, groups, values);
  check_range("width", 2, width, 32);
  check_range("bits", 2, bits, std::min<int64_t>(width, 24));  // float32 holds every integer
  check_range("key", -1, key, 0xFFFFFFFF);
  int64_t count = 64 / width;
  check_flat(words, "words", ScalarType::Long, values);
  check_numel(words, "words", (values.numel() + count - 1) / count);
  return {const_data<float>(scale),
          groups,
          values.numel(),
          static_cast<int>(bits),
          static_cast<int>(width),
          static_cast<int>(count),
          static_cast<uint32_t>(key),
          static_cast<float>(factor)};
}

}  // namespace hvd_compress
