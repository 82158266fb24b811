// The arguments of take, checked: the same on every device.
#pragma once

#include "rim.h"
#include "take.h"

namespace hvd_compress {

inline Take checked(const Tensor& residual, const std::optional<Tensor>& velocity,
                    const Tensor& offsets, const Tensor& segments, const Tensor& invalid,
                    const Tensor& payload, int64_t phase, double limit) {
  int64_t blocks = check_residual(residual, velocity);
  check_slots(offsets, segments, residual);
  check_flat(invalid, "invalid", ScalarType::Int, residual);
  check_numel(invalid, "invalid", 1);
  check_payload(payload, "payload", offsets, residual);
  STD_TORCH_CHECK(limit > 0, "limit has to be > 0, got ", limit);
  return {data<float>(residual),
          velocity_data(velocity),
          const_data<uint8_t>(offsets),
          segment_data(segments),
          const_data<int32_t>(invalid),
          segments.size(0),
          blocks,
          offsets.numel(),
          phase,
          static_cast<float>(limit)};
}

}  // namespace hvd_compress
