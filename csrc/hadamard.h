// hadamard: its argument, and its checks.
#pragma once

#include "checks.h"

namespace hvd_compress {

struct Hadamard {
  float* values;
  int64_t blocks;
};

inline Hadamard checked(const Tensor& values) {
  check_flat(values, "values", ScalarType::Float, values);
  STD_TORCH_CHECK(values.numel() % kBlock == 0, "values must have a multiple of ", kBlock,
                  " entries, got ", values.numel());
  return {data<float>(values), values.numel() / kBlock};
}

}  // namespace hvd_compress
