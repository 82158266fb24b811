// select on the CPU.
#include "select.h"

#include <torch/csrc/stable/ops.h>

#include "isa.h"

namespace hvd_compress {
namespace {

constexpr int64_t kGrain = 128;  // blocks per thread, at least

// The blocks `begin` to `end` of one piece.
struct Blocks {
  static HVD_BODY void run(const Draw* draw, const Piece* piece, const PieceTensor* tensor,
                           int64_t number, uint8_t* indices, int64_t begin, int64_t end) {
    alignas(64) int32_t scores[kBlock];
    const float* score = static_cast<const float*>(tensor->data);
    Select select(*draw, *piece, number);
    int64_t place = select.first_index(begin);
    for (int64_t block = begin; block < end; ++block) {
      int64_t next = select.first_index(block + 1);
      int count = static_cast<int>(next - place), inside = tensor->inside(block);
      if (count > 0) {  // only needed if this rank leads slots
        for (int i = 0; i < inside; ++i) scores[i] = score_bits(score[block * kBlock + i]);
        for (int i = inside; i < kBlock; ++i) scores[i] = 0;
        select_block(select, block, scores, count, indices + place);
      }
      place = next;
    }
  }
};

void select_cpu(Draw draw, std::vector<Tensor> scores, Tensor pieces, Tensor indices) {
  PieceTensors tensors = checked_scores(scores, pieces);
  const Piece* rows = checked_pieces(pieces, indices);
  Indices out = checked_indices(indices, pieces);
  check_selection(draw, rows, tensors, kMaxBlocks, out);
  torch::stable::parallel_for(0, tensors.blocks, kGrain, [&](int64_t begin, int64_t end) {
    auto work = [&](int64_t number, int64_t first, int64_t last) {
      if (rows[number].slots == 0) return;
      run_best<Blocks>(&draw, rows + number, &tensors.rows[number], number, out.data, first, last);
    };
    for_parts(tensors.rows.data(), tensors.rows.size(), begin, end, work);
  });
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CPU, library) {
  library.impl("select", TORCH_BOX(&hvd_compress::DrawLast<&hvd_compress::select_cpu>::run));
}
