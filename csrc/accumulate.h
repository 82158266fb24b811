// accumulate: its arguments, their checks, and the computation of one entry.
#pragma once

#include "accumulate_select.h"
#include "codebook.h"
#include "moments.h"

namespace hvd_compress {

struct Accumulate {
  float* residual;
  double* squares;  // (blocks,), or null
  const Piece* pieces;
  int32_t* invalid;
  const uint8_t* codes;  // of what was sent, or null
  Codebook sent;
  Moments moments;
  int64_t blocks;  // of the bucket
  float scale;
};

// Adds the starts to the gradients' rows, as their weights.
inline void check_starts(const std::vector<Tensor>& starts, PieceTensors& grads,
                         const Tensor& residual) {
  STD_TORCH_CHECK(starts.size() == grads.rows.size(), "starts must have ", grads.rows.size(),
                  " tensors, one per piece, got ", starts.size());
  for (size_t i = 0; i < starts.size(); ++i) {
    PieceTensor& grad = grads.rows[i];
    if (starts[i].numel() == 0) continue;
    check_dense(starts[i], "starts", residual);
    check_dtype(starts[i], "starts", ScalarType::Float);
    check_numel(starts[i], "starts", grad.entries);
    STD_TORCH_CHECK(grad.dtype == ScalarType::Float, "grads with starts must be Float, got ",
                    grad.dtype);
    grad.weight = starts[i].const_data_ptr();
  }
}

inline Accumulate checked(PieceTensors& grads, const std::vector<Tensor>& starts,
                          const Tensor& residual, const Tensor& pieces, const Tensor& edges,
                          const Tensor& moments, const std::optional<Tensor>& squares,
                          const Tensor& invalid, double scale, const std::optional<Tensor>& codes,
                          const std::optional<Tensor>& sent_scale,
                          const std::optional<Tensor>& book, const std::optional<Tensor>& kind,
                          int64_t bits) {
  check_blocks(residual, "residual");
  check_starts(starts, grads, residual);
  check_flat(invalid, "invalid", ScalarType::Int, residual);
  check_numel(invalid, "invalid", 1);
  if (squares) {
    check_flat(*squares, "squares", ScalarType::Double, residual);
    check_numel(*squares, "squares", residual.numel() / kBlock);
  }
  Codebook sent{};
  if (codes) {
    STD_TORCH_CHECK(sent_scale && book && kind, "codes go with sent_scale, book and kind");
    sent = checked(residual, *sent_scale, edges, *book, *kind, *codes, bits);
  }
  return {data<float>(residual),
          squares ? data<double>(*squares) : nullptr,
          checked_pieces(pieces, residual),
          data<int32_t>(invalid),
          codes ? const_data<uint8_t>(*codes) : nullptr,
          sent,
          checked(residual, edges, moments),
          residual.numel() / kBlock,
          static_cast<float>(scale)};
}

}  // namespace hvd_compress
