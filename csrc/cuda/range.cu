// range_encode and range_decode on CUDA.
#include "../range.h"
#include "codes.h"

namespace hvd_compress {
namespace {

struct RangeCode {
  Window window;

  __device__ RangeCode(const Range& args, int64_t group) : window(args, group) {}

  __device__ uint32_t encode(float value, float& error) const {
    Ranged ranged = window.encode(value);
    error = ranged.error;
    return ranged.code;
  }
  __device__ float decode(uint32_t code) const { return window.decode(code); }
};

void range_encode_cuda(Tensor values, Tensor base, Tensor edges, Tensor codes,
                       Tensor quantization_error, int64_t bits, int64_t mantissa,
                       int64_t positive) {
  Range args = checked(values, base, edges, codes, bits, mantissa, positive);
  check_quantization_error(quantization_error, values);
  encode_all<RangeCode>(args, values, codes, data<float>(quantization_error));
}

void range_decode_cuda(Tensor codes, Tensor base, Tensor edges, Tensor values, int64_t bits,
                       int64_t mantissa, int64_t positive, bool add) {
  Range args = checked(values, base, edges, codes, bits, mantissa, positive);
  decode_all<RangeCode>(args, codes, values, add);
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, HVD_CUDA_KEY, library) {
  library.impl("range_encode", TORCH_BOX(&hvd_compress::range_encode_cuda));
  library.impl("range_decode", TORCH_BOX(&hvd_compress::range_decode_cuda));
}
