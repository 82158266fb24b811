// accumulate on the CPU: what one thread does to a few blocks is in its cache for the moments.
#include "../accumulate.h"

#include <atomic>

#include "codebook.h"
#include "convert.h"
#include "moments.h"
#include "pieces.h"

namespace hvd_compress {
namespace {

// The sum of squares of a block, in the order of moments.
HVD_BODY double square_of(const float* __restrict steps) {
  double sums[kSums] = {};
  for (int row = 0; row < kBlock; row += kSums) {
    for (int i = 0; i < kSums; ++i) {
      sums[i] += static_cast<double>(steps[row + i]) * static_cast<double>(steps[row + i]);
    }
  }
  for (int width = kSums / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) sums[i] += sums[i + width];
  }
  return sums[0];
}

// The blocks `begin` to `end` of one piece. Returns whether a gradient is not usable.
struct AddBlocks {
  static HVD_BODY bool run(const Accumulate* args, const PieceTensor* tensor, const Piece* piece,
                           int64_t begin, int64_t end) {
    alignas(64) float steps[kBlock];
    const float* starts = static_cast<const float*>(tensor->weight);
    uint32_t bad = 0;
    for (int64_t block = begin; block < end; ++block) {
      int64_t first = block * kBlock;
      int inside = tensor->inside(block);
      const char* grad = static_cast<const char*>(tensor->data) + first * tensor->entry_size();
      convert(grad, tensor->dtype, inside, steps);
      if (starts) {
        for (int i = 0; i < inside; ++i) steps[i] -= starts[first + i];
      }
      if (args->squares) args->squares[piece->first_block + block] = square_of(steps);
      float* residual = args->residual + (piece->first_block + block) * kBlock;
      for (int i = 0; i < kBlock; ++i) {
        Entry entry = accumulate<false>(steps[i] * args->scale, residual[i], 0.0f, 0.0f);
        residual[i] = entry.residual;
        bad |= !entry.usable;
      }
    }
    return bad != 0;
  }
};

void accumulate_cpu(std::vector<Tensor> grads, std::vector<Tensor> starts, Tensor residual,
                    Tensor pieces, Tensor edges, Tensor moments, std::optional<Tensor> squares,
                    Tensor invalid, double scale, std::optional<Tensor> codes,
                    std::optional<Tensor> sent_scale, std::optional<Tensor> book,
                    std::optional<Tensor> kind, int64_t bits) {
  PieceTensors tensors = checked_tensors(grads, "grads", pieces);
  Accumulate args = checked(tensors, starts, residual, pieces, edges, moments, squares, invalid,
                            scale, codes, sent_scale, book, kind, bits);
  int64_t count = tensors.rows.size();
  check_pieces(args.pieces, tensors, args.blocks);
  check_edges(args.moments.groups, args.moments.size);
  std::vector<float> negative;  // scales, to subtract what was sent by adding
  std::vector<Row> table;
  DecodeUnits decode = nullptr;
  if (args.codes) {
    table = checked_rows(args.sent);
    decode = decoder(args.sent.bits);
    for (int64_t i = 0; i < args.sent.groups.count; ++i) negative.push_back(-args.sent.scale[i]);
    args.sent.scale = negative.data();
  }
  Rows rows{args.sent, table.data(), nullptr};
  std::atomic<int32_t> bad{0};
  auto write = [&](int64_t first, int64_t last) {
    if (decode) decode(&rows, args.codes, args.residual + first, true, first / 8, last / 8);
    for_parts(args.pieces, count, first / kBlock, last / kBlock,
              [&](int64_t i, int64_t begin, int64_t end) {
                const PieceTensor& tensor = tensors.rows[i];
                if (tensor.entries == 0) return;
                if (run_best<AddBlocks>(&args, &tensor, args.pieces + i, begin, end)) {
                  bad.store(1, std::memory_order_relaxed);
                }
              });
  };
  for_moments(args.moments.groups, args.residual, write,
              [&](int64_t group, const Sums& sums) { args.moments.store(group, sums); });
  if (bad) *args.invalid = 1;
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CPU, library) {
  library.impl("accumulate", TORCH_BOX(&hvd_compress::accumulate_cpu));
}
