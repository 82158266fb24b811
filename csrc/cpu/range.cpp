// range_encode and range_decode on the CPU.
#include "../range.h"

#include "codes.h"

namespace hvd_compress {
namespace {

struct RangeCode : Range {
  template <typename Digit>
  HVD_BODY void encode(int64_t group, const float* __restrict values, float* __restrict error,
                       Digit* __restrict digits, int count) const {
    Window window(*this, group);
    for (int i = 0; i < count; ++i) {
      Ranged ranged = window.encode(values[i]);
      digits[i] = static_cast<Digit>(ranged.code);
      error[i] = ranged.error;
    }
  }

  template <typename Digit>
  HVD_BODY void decode(int64_t group, const Digit* __restrict digits, float* __restrict values,
                       int count, bool add) const {
    Window window(*this, group);
    for (int i = 0; i < count; ++i) {
      float value = window.decode(digits[i]);
      values[i] = add ? values[i] + value : value;
    }
  }
};

RangeCode checked_code(const Range& args) {
  check_edges(args.groups, args.size);
  int64_t codes = std::max(args.positive, args.negative());
  int64_t highest = (int64_t{0x7f7fffff} >> args.shift) - codes + 1;
  for (int64_t group = 0; group < args.groups.count; ++group) {
    check_range("every base", 1, args.base[group], highest);
  }
  return {args};
}

void range_encode_cpu(Tensor values, Tensor base, Tensor edges, Tensor codes,
                      Tensor quantization_error, int64_t bits, int64_t mantissa, int64_t positive) {
  RangeCode code = checked_code(checked(values, base, edges, codes, bits, mantissa, positive));
  check_quantization_error(quantization_error, values);
  const float* from = const_data<float>(values);
  float* error = data<float>(quantization_error);
  uint8_t* to = data<uint8_t>(codes);
#ifdef HVD_V4
  if (isa_level() == 4) {
    return bits <= 8 ? encode_wide<uint8_t>(code, from, error, to)
                     : encode_wide<uint16_t>(code, from, error, to);
  }
#endif
  bits <= 8 ? encode_plain<uint8_t>(code, from, error, to)
            : encode_plain<uint16_t>(code, from, error, to);
}

void range_decode_cpu(Tensor codes, Tensor base, Tensor edges, Tensor values, int64_t bits,
                      int64_t mantissa, int64_t positive, bool add) {
  RangeCode code = checked_code(checked(values, base, edges, codes, bits, mantissa, positive));
  const uint8_t* from = const_data<uint8_t>(codes);
  float* to = data<float>(values);
#ifdef HVD_V4
  if (isa_level() == 4) return decode_wide(code, from, to, add);
#endif
  bits <= 8 ? decode_plain<uint8_t>(code, from, to, add)
            : decode_plain<uint16_t>(code, from, to, add);
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CPU, library) {
  library.impl("range_encode", TORCH_BOX(&hvd_compress::range_encode_cpu));
  library.impl("range_decode", TORCH_BOX(&hvd_compress::range_decode_cpu));
}
