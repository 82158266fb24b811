// block_means_send and block_means_keep: their arguments, and their checks.
#pragma once

#include "accumulate_select.h"
#include "checks.h"

namespace hvd_compress {

struct BlockMeansSend {
  float* fresh;
  float* unsent;
  float* velocity;  // or null
  float* out;
  int32_t* invalid;
  int64_t blocks;
  float momentum;
};

struct BlockMeansKeep {
  const float* mean;
  const float* error;
  float* unsent;
  int64_t blocks;
};

inline void check_block_means(const Tensor& tensor, const char* name, const Tensor& unsent) {
  check_flat(tensor, name, ScalarType::Float, unsent);
  check_numel(tensor, name, unsent.numel());
  check_no_overlap(tensor, name, unsent, "unsent");
}

inline BlockMeansSend checked(const Tensor& fresh, const Tensor& unsent,
                              const std::optional<Tensor>& velocity, const Tensor& out,
                              const Tensor& invalid, double momentum) {
  check_flat(unsent, "unsent", ScalarType::Float, unsent);
  check_block_means(fresh, "fresh", unsent);
  if (velocity) check_block_means(*velocity, "velocity", unsent);
  check_block_means(out, "out", unsent);
  check_no_overlap(out, "out", fresh, "fresh");
  check_flat(invalid, "invalid", ScalarType::Int, unsent);
  check_numel(invalid, "invalid", 1);
  return {
      data<float>(fresh),     data<float>(unsent), data_or_null(velocity),      data<float>(out),
      data<int32_t>(invalid), unsent.numel(),      static_cast<float>(momentum)};
}

inline BlockMeansKeep checked(const Tensor& mean, const Tensor& quantization_error,
                              const Tensor& unsent) {
  check_flat(unsent, "unsent", ScalarType::Float, unsent);
  check_block_means(mean, "mean", unsent);
  check_block_means(quantization_error, "quantization_error", unsent);
  return {const_data<float>(mean), const_data<float>(quantization_error), data<float>(unsent),
          unsent.numel()};
}

}  // namespace hvd_compress
