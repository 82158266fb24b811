// The arguments of put, checked: the same on every device.
#pragma once

#include "put.h"
#include "rim.h"

namespace hvd_compress {

inline Put checked(const std::vector<Tensor>& grads, const Tensor& residual, const Tensor& offsets,
                   const Tensor& segments, const Tensor& total, const Tensor& sent, int64_t phase,
                   double scale) {
  int64_t blocks = check_residual(residual, std::nullopt);
  check_slots(offsets, segments, residual);
  STD_TORCH_CHECK(static_cast<int64_t>(grads.size()) == segments.size(0), "grads has to have ",
                  segments.size(0), " tensors, one a segment, got ", grads.size());
  for (const Tensor& grad : grads) check_dense(grad, "every grad", residual);
  check_payload(total, "total", offsets, residual);
  check_payload(sent, "sent", offsets, residual);
  check_dtype(sent, "sent", total.scalar_type());
  return {data<float>(residual),
          const_data<uint8_t>(offsets),
          segment_data(segments),
          segments.size(0),
          blocks,
          offsets.numel(),
          phase,
          static_cast<float>(scale)};
}

}  // namespace hvd_compress
