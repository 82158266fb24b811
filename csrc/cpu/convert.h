// Entries of a block as float32, on the CPU.
#pragma once

#include <type_traits>

#include "../pieces.h"
#include "isa.h"

namespace hvd_compress {

// Converts a block's entries to float32, followed by zeros. Returns whether any is neither 0 nor
// -0.
template <typename T>
HVD_BODY bool convert(const T* __restrict from, int inside, float* __restrict to) {
  using Word = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
  Word any = 0;
  for (int i = 0; i < inside; ++i) {
    any |= bits_as<Word>(from[i]);
    to[i] = static_cast<float>(from[i]);
  }
  for (int i = inside; i < kBlock; ++i) to[i] = 0.0f;
  return static_cast<Word>(any << 1) != 0;
}

HVD_BODY bool convert(const void* from, ScalarType dtype, int inside, float* to) {
  switch (dtype) {
    case ScalarType::Float:
      return convert(static_cast<const float*>(from), inside, to);
    case ScalarType::Half:
      return convert(static_cast<const Half*>(from), inside, to);
    default:
      return convert(static_cast<const BFloat16*>(from), inside, to);
  }
}

}  // namespace hvd_compress
