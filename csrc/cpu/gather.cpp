// gather on the CPU.
#include "../gather.h"

#include <torch/csrc/stable/ops.h>

#include "pieces.h"

namespace hvd_compress {
namespace {

constexpr int64_t kGrain = 1024;  // blocks per thread, at least

void gather_cpu(Tensor residual, Tensor indices, Tensor pieces, Tensor values, int64_t phase) {
  Gather args = checked(residual, indices, pieces, values, phase);
  check_pieces(args.bucket);
  const BucketSlots& bucket = args.bucket;
  torch::stable::parallel_for(0, bucket.blocks, kGrain, [&](int64_t begin, int64_t end) {
    for_parts(bucket.pieces, bucket.piece_count, begin, end,
              [&](int64_t index, int64_t first, int64_t last) {
                const Piece& piece = bucket.pieces[index];
                const float* from = args.residual + piece.first_block * kBlock;
                float* to = args.values;
                for_slots(
                    bucket, piece, first, last,
                    [=](int64_t entry) { __builtin_prefetch(from + entry); },
                    [=](int64_t slot, int64_t entry) { to[slot] = from[entry]; });
              });
  });
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CPU, library) {
  library.impl("gather", TORCH_BOX(&hvd_compress::gather_cpu));
}
