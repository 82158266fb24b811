// gather: its arguments, and their checks.
#pragma once

#include "pieces.h"

namespace hvd_compress {

struct Gather {
  BucketSlots bucket;
  const float* residual;
  float* values;
};

inline Gather checked(const Tensor& residual, const Tensor& indices, const Tensor& pieces,
                      const Tensor& values, int64_t phase) {
  check_residual(residual, std::nullopt);
  BucketSlots bucket = checked_slots(residual, indices, pieces, phase);
  check_flat(values, "values", ScalarType::Float, residual);
  check_numel(values, "values", bucket.slots);
  return {bucket, const_data<float>(residual), data<float>(values)};
}

}  // namespace hvd_compress
