// One value of moments.
#pragma once

#include "groups.h"

namespace hvd_compress {

constexpr int kSums = 32;  // running sums, a part of the specification

struct Moments {
  const float* values;
  double* out;  // three a group
  Groups groups;
  int64_t size;  // of values
};

HVD_BODY float larger(float magnitude, float largest) {
  return magnitude > largest ? magnitude : largest;  // `largest` is no NaN, and becomes none
}

HVD_BODY void take_moments(float value, double& square, double& fourth, float& largest) {
  double product = static_cast<double>(value) * static_cast<double>(value);
  square += product;
  fourth += product * product;
  largest = larger(bits_as<float>(bits_as<uint32_t>(value) & 0x7fffffffu), largest);
}

}  // namespace hvd_compress
