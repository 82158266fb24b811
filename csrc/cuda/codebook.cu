// codebook_encode and codebook_decode on CUDA. The book stays in the L1 cache.
#include "../codebook.h"
#include "codes.h"

namespace hvd_compress {
namespace {

struct Levels {
  const float* levels;
  float step;
  float inverse;
  int bits;

  __device__ Levels(const Codebook& args, int64_t group)
      : levels(args.levels(row(args, group))),
        step(args.scale[group]),
        inverse(1.0f / step),
        bits(args.bits) {}

  __device__ uint32_t encode(float value, float& error) const {
    int code = nearest(levels, bits, value * inverse);
    error = value - levels[code] * step;
    return static_cast<uint32_t>(code);
  }
  __device__ float decode(uint32_t code) const { return levels[code] * step; }

 private:
  // Not checked on the host.
  static __device__ int64_t row(const Codebook& args, int64_t group) {
    int64_t kind = args.kind[group];
    return kind < 0 || kind >= args.kinds ? 0 : kind;
  }
};

void codebook_encode_cuda(Tensor values, Tensor scale, Tensor edges, Tensor book, Tensor kind,
                          Tensor codes, Tensor quantization_error, int64_t bits) {
  Codebook args = checked(values, scale, edges, book, kind, codes, bits);
  check_quantization_error(quantization_error, values);
  encode_all<Levels>(args, values, codes, quantization_error);
}

void codebook_decode_cuda(Tensor codes, Tensor scale, Tensor edges, Tensor book, Tensor kind,
                          Tensor values, int64_t bits, bool add) {
  Codebook args = checked(values, scale, edges, book, kind, codes, bits);
  decode_all<Levels>(args, codes, values, add);
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, HVD_CUDA_KEY, library) {
  library.impl("codebook_encode", TORCH_BOX(&hvd_compress::codebook_encode_cuda));
  library.impl("codebook_decode", TORCH_BOX(&hvd_compress::codebook_decode_cuda));
}
