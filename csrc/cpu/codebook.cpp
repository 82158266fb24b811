// codebook_encode and codebook_decode on the CPU.
#include "codebook.h"

namespace hvd_compress {
namespace {

void codebook_encode_cpu(Tensor values, Tensor scale, Tensor edges, Tensor book, Tensor kind,
                         Tensor codes, std::optional<Tensor> quantization_error, int64_t bits) {
  Codebook args = checked(values, scale, edges, book, kind, codes, bits);
  check_error(quantization_error, values);
  std::vector<Row> table = checked_rows(args);
  std::vector<Cells> cells;
  [[maybe_unused]] bool usable = args.bits > kNarrowBits;
  for (int64_t i = 0; args.bits > kNarrowBits && i < args.kinds; ++i) {
    cells.emplace_back(args.levels(i), args.bits);
    usable &= cells.back().usable();
  }
  Rows rows{args, table.data(), cells.data()};
  const float* from = const_data<float>(values);
  float* error = data_or_null(quantization_error);
  uint8_t* to = data<uint8_t>(codes);
#ifdef HVD_V4
  if (isa_level() == 4) {
    if (usable) return encode_wide<uint8_t>(CellCode{rows}, from, error, to);
    if (args.bits <= kNarrowBits) {
      return with_bits<kNarrowBits>(args.bits, [&](auto constant) {
        encode_wide<uint8_t>(PermuteCode<decltype(constant)::value>{rows}, from, error, to);
      });
    }
  }
  if (isa_level() == 3) {
    if (usable) return encode_plain<uint8_t>(CellCode{rows}, from, error, to);
    if (args.bits <= kNarrowBits) {
      return with_bits<kNarrowBits>(args.bits, [&](auto constant) {
        encode_narrow(NarrowCode<decltype(constant)::value>{rows}, from, error, to);
      });
    }
  }
#endif
  encode_plain<uint8_t>(PlainCode{rows}, from, error, to);
}

void codebook_decode_cpu(Tensor codes, Tensor scale, Tensor edges, Tensor book, Tensor kind,
                         Tensor values, int64_t bits, bool add) {
  Codebook args = checked(values, scale, edges, book, kind, codes, bits);
  std::vector<Row> table = checked_rows(args);
  Rows rows{args, table.data(), nullptr};
  const uint8_t* from = const_data<uint8_t>(codes);
  float* to = data<float>(values);
  DecodeUnits decode = decoder(args.bits);
  torch::stable::parallel_for(0, (args.size + 7) / 8, kGrain, [&](int64_t begin, int64_t end) {
    decode(&rows, from, to + begin * 8, add, begin, end);
  });
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CPU, library) {
  library.impl("codebook_encode", TORCH_BOX(&hvd_compress::codebook_encode_cpu));
  library.impl("codebook_decode", TORCH_BOX(&hvd_compress::codebook_decode_cpu));
}
