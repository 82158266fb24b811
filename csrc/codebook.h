// One value of codebook_encode and codebook_decode.
#pragma once

#include "groups.h"

namespace hvd_compress {

struct Codebook {
  const float* scale;
  const float* book;
  const int64_t* kind;
  Groups groups;
  int64_t size;  // of values
  int64_t kinds;
  int bits;

  HVD_BODY const float* levels(int64_t row) const { return book + (row << bits); }
};

HVD_BODY float midpoint(const float* levels, int i) { return (levels[i] + levels[i + 1]) * 0.5f; }

}  // namespace hvd_compress
