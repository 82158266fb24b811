// lanes_encode and lanes_decode: their arguments, their checks, and the computation of one value.
#pragma once

#include "groups.h"

namespace hvd_compress {

struct Lanes {
  const float* scale;
  Groups groups;
  int64_t size;  // number of values
  int bits;
  int width;
  int count;  // lanes per word
  uint32_t key;
  float factor;

  // The sum of 2**(width - 1) in every lane: added to a word, it makes all digits unsigned fields.
  HVD_BODY uint64_t bias() const {
    uint64_t sum = 0;
    for (int lane = 0; lane < count; ++lane) sum += uint64_t{1} << (width * lane + width - 1);
    return sum;
  }
};

struct Rounded {
  int32_t digit;
  float error;
};

// The grid of one group.
struct Grid {
  float step;
  float inverse;
  float top;

  HVD_BODY Grid(const Lanes& args, int64_t group)
      : step(args.scale[group]),
        inverse(1.0f / step),
        top(static_cast<float>((int64_t{1} << (args.bits - 1)) - 1)) {}

  // Clamped before rounding, so that the conversion does not overflow.
  HVD_BODY Rounded encode(float value, float draw) const {
    float scaled = value * inverse + draw;
    scaled = scaled == scaled ? scaled : 0.0f;
    scaled = scaled > -top ? scaled : -top;
    scaled = scaled < top ? scaled : top;
    int32_t digit = static_cast<int32_t>(scaled);
    digit -= static_cast<float>(digit) > scaled;
    return {digit, value - static_cast<float>(digit) * step};
  }
};

// A uniform draw in [0, 1).
HVD_BODY float uniform(int64_t index, uint32_t key) {
  return static_cast<float>(static_cast<int32_t>(mix(static_cast<uint32_t>(index), key) >> 8)) *
         0x1p-24f;
}

// The value of a lane's sum. `field` is the sum plus `half`.
HVD_BODY float as_value(uint32_t field, uint32_t half, float step) {
  return static_cast<float>(static_cast<int32_t>(field - half)) * step;
}

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
