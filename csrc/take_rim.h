// The arguments of take, checked: the same on every device.
#pragma once

#include "rim.h"

namespace hvd_compress {

struct Take {
  Picks picks;
  const float* residual;
  float* values;
};

inline Take checked(const Tensor& residual, const Tensor& offsets, const Tensor& segments,
                    const Tensor& values, int64_t phase) {
  check_residual(residual, std::nullopt);
  Picks picks = checked_picks(residual, offsets, segments, phase);
  check_flat(values, "values", ScalarType::Float, residual);
  check_numel(values, "values", picks.slots);
  return {picks, const_data<float>(residual), data<float>(values)};
}

}  // namespace hvd_compress
