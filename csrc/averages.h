// codebook_mean, codebook_moments and codebook_move: what becomes of codes that were received.
// Their arguments, their checks, and the computation of one entry.
#pragma once

#include "accumulate_select.h"
#include "codebook.h"
#include "moments.h"

namespace hvd_compress {

struct Mean {
  Codebook codebook;  // of all ranks
  const uint8_t* codes;
  const float* values;  // of this rank
  float* mean;
  Moments moments;
  int64_t stride;  // bytes from rank to rank
  int64_t ranks;
  int64_t rank;
  float factor;

  // With the scales and kinds of one rank.
  HVD_BODY Codebook of(int64_t sender) const {
    Codebook one = codebook;
    one.scale += sender * codebook.groups.count;
    one.kind += sender * codebook.groups.count;
    return one;
  }
};

inline Mean checked(const Tensor& rows, const Tensor& values, const Tensor& scale,
                    const Tensor& edges, const Tensor& book, const Tensor& kind, const Tensor& mean,
                    const Tensor& moments, int64_t rank, int64_t skip, int64_t bits) {
  check_flat(rows, "rows", ScalarType::Byte, values);
  check_flat(values, "values", ScalarType::Float, values);
  STD_TORCH_CHECK(rows.dim() == 2 && rows.size(0) > 0, "rows must be of shape (ranks, bytes)");
  int64_t ranks = rows.size(0), size = values.numel(), bytes = (size + 7) / 8 * bits;
  Codebook codebook = checked(size, scale, edges, book, kind, bits, values, ranks);
  check_range("skip", 0, skip, rows.size(1));
  STD_TORCH_CHECK(bytes <= rows.size(1) - skip, "rows must have ", bytes, " bytes of codes, got ",
                  rows.size(1) - skip);
  check_range("rank", 0, rank, ranks - 1);
  check_flat(mean, "mean", ScalarType::Float, values);
  check_numel(mean, "mean", size);
  check_no_overlap(mean, "mean", values, "values");
  return {codebook,
          const_data<uint8_t>(rows) + skip,
          const_data<float>(values),
          data<float>(mean),
          checked(mean, edges, moments),
          rows.size(1),
          ranks,
          rank,
          static_cast<float>(1.0 / static_cast<double>(ranks))};
}

struct Move {
  Codebook codebook;
  const float* factor;  // of the averages, or null
  float* common;
  float* velocity;  // or null
  float* own;
  const float* before;  // or null
  float lr;
  float momentum;

  HVD_BODY float factor_or_one() const { return factor ? *factor : 1.0f; }
};

// Moves an entry by its average. Returns the rank's own weight, without progress since `before`.
HVD_BODY float moved(const Move& args, float average, float& common, float& velocity) {
  float step = is_usable(average) ? average : 0.0f, left = average - step;
  if (args.velocity) {
    velocity = velocity * args.momentum + step;
    step = step + velocity * args.momentum;
  }
  common = common + (args.lr == 1.0f ? step : step * args.lr);
  return common + left;
}

inline Move checked(const Tensor& codes, const Tensor& scale, const Tensor& edges,
                    const Tensor& book, const Tensor& kind, const std::optional<Tensor>& factor,
                    const Tensor& common, const std::optional<Tensor>& velocity, const Tensor& own,
                    const std::optional<Tensor>& before, double lr, double momentum, int64_t bits) {
  auto check = [&](const Tensor& tensor, const char* name) {
    check_dense(tensor, name, common);
    check_numel(tensor, name, common.numel());
    check_dtype(tensor, name, ScalarType::Float);
  };
  check(common, "common");
  check(own, "own");
  if (velocity) check(*velocity, "velocity");
  if (before) check(*before, "before");
  if (factor) {
    check_flat(*factor, "factor", ScalarType::Float, common);
    check_numel(*factor, "factor", 1);
  }
  Codebook codebook = checked(common.numel(), scale, edges, book, kind, bits, common);
  check_codes(codes, bits, common.numel(), common);
  return {codebook,
          factor ? const_data<float>(*factor) : nullptr,
          data<float>(common),
          data_or_null(velocity),
          data<float>(own),
          before ? const_data<float>(*before) : nullptr,
          static_cast<float>(lr),
          static_cast<float>(momentum)};
}

// For codebook_moments, whose values are one group.
inline Codebook checked_moments(const Tensor& codes, const Tensor& scale, const Tensor& edges,
                                const Tensor& book, const Tensor& kind, const Tensor& out,
                                int64_t count, int64_t bits) {
  check_range("count", 0, count, int64_t{1} << 40);
  Codebook args = checked(count, scale, edges, book, kind, bits, codes);
  check_codes(codes, bits, count, codes);
  check_flat(out, "out", ScalarType::Double, codes);
  check_numel(out, "out", 3);
  return args;
}

}  // namespace hvd_compress
