// The arguments of means_send and means_keep, checked: the same on every device.
#pragma once

#include "accumulate_select.h"
#include "rim.h"

namespace hvd_compress {

struct MeansSend {
  float* fresh;
  float* held;
  float* velocity;  // or null
  float* out;
  int32_t* invalid;
  int64_t blocks;
  float momentum;
};

struct MeansKeep {
  const float* mean;
  const float* lost;
  float* held;
  int64_t blocks;
};

inline void check_means(const Tensor& tensor, const char* name, const Tensor& held) {
  check_flat(tensor, name, ScalarType::Float, held);
  check_numel(tensor, name, held.numel());
  check_apart(tensor, name, held, "held");
}

inline MeansSend checked(const Tensor& fresh, const Tensor& held,
                         const std::optional<Tensor>& velocity, const Tensor& out,
                         const Tensor& invalid, double momentum) {
  check_flat(held, "held", ScalarType::Float, held);
  check_means(fresh, "fresh", held);
  if (velocity) check_means(*velocity, "velocity", held);
  check_means(out, "out", held);
  check_apart(out, "out", fresh, "fresh");
  check_flat(invalid, "invalid", ScalarType::Int, held);
  check_numel(invalid, "invalid", 1);
  return {data<float>(fresh),     data<float>(held), data_or_null(velocity),      data<float>(out),
          data<int32_t>(invalid), held.numel(),      static_cast<float>(momentum)};
}

inline MeansKeep checked(const Tensor& mean, const Tensor& lost, const Tensor& held) {
  check_flat(held, "held", ScalarType::Float, held);
  check_means(mean, "mean", held);
  check_means(lost, "lost", held);
  return {const_data<float>(mean), const_data<float>(lost), data<float>(held), held.numel()};
}

}  // namespace hvd_compress
