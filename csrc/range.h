// range_encode and range_decode: their arguments, their checks, and the computation of one value.
#pragma once

#include "groups.h"

namespace hvd_compress {

struct Range {
  const int64_t* base;
  Groups groups;
  int64_t size;  // number of values
  int bits;
  int shift;
  uint32_t positive;  // number of codes

  HVD_BODY uint32_t negative() const { return (1u << bits) - 1 - positive; }
};

struct Ranged {
  uint32_t code;
  float error;
};

// The window of one group. A magnitude is the bits of a float without its sign; as integers they
// have the same order as the floats.
struct Window {
  uint32_t before;  // the first magnitude in steps, minus 1
  uint32_t least;   // the least magnitude with a nonzero code
  uint32_t positive;
  uint32_t negative;
  int shift;

  HVD_BODY Window(const Range& args, int64_t group)
      : before(static_cast<uint32_t>(args.base[group]) - 1),
        least(bits_as<uint32_t>(bits_as<float>((before + 1) << args.shift) * 0.5f)),
        positive(args.positive),
        negative(args.negative()),
        shift(args.shift) {}

  // Conditions are masks, because branches would often be mispredicted.
  HVD_BODY Ranged encode(float value) const {
    constexpr uint32_t kInfinity = 0x7f800000u, kSign = 0x80000000u;
    uint32_t word = bits_as<uint32_t>(value);
    uint32_t magnitude = word & ~kSign;
    uint32_t below = 0u - (word >> 31);
    uint32_t coded =
        0u - static_cast<uint32_t>(magnitude - least <= kInfinity - least);  // 0 for a NaN
    int32_t last = static_cast<int32_t>((positive & ~below) | (negative & below));
    int32_t step = static_cast<int32_t>((magnitude + (1u << (shift - 1))) >> shift) -
                   static_cast<int32_t>(before);
    step = step < 1 ? 1 : step;
    step = step > last ? last : step;
    uint32_t decoded = (before + static_cast<uint32_t>(step)) << shift | (word & kSign);
    return {(static_cast<uint32_t>(step) + (positive & below)) & coded,
            value - bits_as<float>(decoded & coded)};
  }

  HVD_BODY float decode(uint32_t code) const {
    uint32_t below = 0u - static_cast<uint32_t>(code > positive);
    uint32_t word = (before + code - (positive & below)) << shift | below << 31;
    return bits_as<float>(code ? word : 0);
  }
};

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
