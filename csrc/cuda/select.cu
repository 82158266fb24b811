// select on CUDA: one warp per block.
#include "../select.h"
#include "pieces.h"
#include "select.h"

namespace hvd_compress {
namespace {

__global__ void __launch_bounds__(kThreads)
    select_kernel(const __grid_constant__ Draw draw, const __grid_constant__ TensorBlocks tensors,
                  const Piece* __restrict__ pieces, const __grid_constant__ Indices indices) {
  TensorBlock found;
  if (warp_id() >= tensors.blocks) return;
  if (!find_block(tensors, pieces, kMaxBlocks, warp_id(), found)) return;
  if (found.piece.slots == 0) return;
  Select select(draw, found.piece, found.number);
  LeaderSlots leads = leader_slots(select, found.block, indices);
  if (leads.count == 0) return;  // only needed if this rank leads slots
  const float* score = static_cast<const float*>(found.tensor.data);
  float mine[kPerLane];
  int32_t scores[kPerLane];
  load(mine, score + found.block * kBlock, found.tensor.inside(found.block), on_16_bytes(score));
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) scores[i] = score_bits(mine[i]);
  select_block(select, found.block, scores, leads, indices);
}

void select_cuda(Draw draw, std::vector<Tensor> scores, Tensor pieces, Tensor indices) {
  PieceTensors tensors = checked_scores(scores, pieces);
  const Piece* table = checked_pieces(pieces, indices);
  Indices out = checked_indices(indices, pieces);
  if (tensors.blocks == 0) return;
  Launch launch(pieces);
  DeviceRows rows(tensors.rows, pieces);
  TensorBlocks blocks{rows.data(), pieces.size(0), tensors.blocks};
  launch.run(grid_for(tensors.blocks), select_kernel, draw, blocks, table, out);
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, HVD_CUDA_KEY, library) {
  library.impl("select", TORCH_BOX(&hvd_compress::DrawLast<&hvd_compress::select_cuda>::run));
}
