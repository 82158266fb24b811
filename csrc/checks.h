// Checks of tensors, and access to their data.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "block.h"

namespace hvd_compress {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline void check_dtype(const Tensor& tensor, const char* name, ScalarType dtype) {
  STD_TORCH_CHECK(tensor.scalar_type() == dtype, name, " must be ", dtype, ", got ",
                  tensor.scalar_type());
}

inline void check_device(const Tensor& tensor, const char* name, const Tensor& other) {
  STD_TORCH_CHECK(tensor.device() == other.device(), name,
                  " must be on the device of the other tensors, got another one");
}

// A contiguous tensor of a given dtype, on the device of `other`.
inline void check_flat(const Tensor& tensor, const char* name, ScalarType dtype,
                       const Tensor& other) {
  check_dtype(tensor, name, dtype);
  check_device(tensor, name, other);
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous");
}

inline void check_numel(const Tensor& tensor, const char* name, int64_t numel) {
  STD_TORCH_CHECK(tensor.numel() == numel, name, " must have ", numel, " entries, got ",
                  tensor.numel());
}

// A floating-point tensor that is dense in any memory order: its entries are data[0 .. numel - 1].
inline void check_dense(const Tensor& tensor, const char* name, const Tensor& other) {
  ScalarType dtype = tensor.scalar_type();
  STD_TORCH_CHECK(
      dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16,
      name, " must be Float, Half or BFloat16, got ", dtype);
  check_device(tensor, name, other);
  if (tensor.is_contiguous()) return;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) != 1) dims.emplace_back(tensor.stride(i), tensor.size(i));
  }
  std::sort(dims.begin(), dims.end());
  int64_t expected = 1;
  for (auto [stride, size] : dims) {
    STD_TORCH_CHECK(stride == expected, name, " must be dense in memory, got a stride of ", stride,
                    " where ", expected, " is required");
    expected *= size;
  }
}

// A contiguous float32 tensor of whole blocks.
inline void check_blocks(const Tensor& tensor, const char* name) {
  check_flat(tensor, name, ScalarType::Float, tensor);
  STD_TORCH_CHECK(tensor.numel() % kBlock == 0, name, " must have a multiple of 256 entries, got ",
                  tensor.numel());
}

inline void check_residual(const Tensor& residual, const std::optional<Tensor>& velocity) {
  check_blocks(residual, "residual");
  if (velocity) {
    check_flat(*velocity, "velocity", ScalarType::Float, residual);
    check_numel(*velocity, "velocity", residual.numel());
  }
}

template <typename T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

template <typename T>
const T* const_data(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

inline float* data_or_null(const std::optional<Tensor>& tensor) {
  return tensor ? data<float>(*tensor) : nullptr;
}

// For two contiguous tensors of one dtype.
inline void check_no_overlap(const Tensor& one, const char* name, const Tensor& other,
                             const char* other_name) {
  const uint8_t* begin = const_data<uint8_t>(one);
  const uint8_t* other_begin = const_data<uint8_t>(other);
  int64_t size = one.element_size();
  STD_TORCH_CHECK(
      begin + one.numel() * size <= other_begin || other_begin + other.numel() * size <= begin,
      name, " must not overlap ", other_name);
}

// Calls f with a value of the C++ type of a dtype that check_dense allows.
template <typename F>
void with_type(ScalarType dtype, F f) {
  if (dtype == ScalarType::Float) {
    f(float());
  } else if (dtype == ScalarType::Half) {
    f(Half());
  } else {
    f(BFloat16());
  }
}

}  // namespace hvd_compress
