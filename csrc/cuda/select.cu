// select on CUDA: one warp per block.
#include "../select.h"
#include "entries.h"
#include "select.h"

namespace hvd_compress {
namespace {

__global__ void __launch_bounds__(kThreads)
    select_kernel(const __grid_constant__ Select args, const float* __restrict__ score,
                  bool aligned) {
  int64_t block = warp_id();
  if (block >= args.blocks) return;
  LeaderSlots leads = leader_slots(args, block);
  if (leads.count == 0) return;  // only needed if this rank leads slots
  float mine[kPerLane];
  int32_t scores[kPerLane];
  load(mine, score + block * kBlock, kBlock, aligned);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) scores[i] = score_bits(mine[i]);
  select_block(args, block, scores, leads);
}

void select_cuda(Tensor score, Tensor indices, int64_t slots, int64_t first_slot, int64_t phase,
                 int64_t run, int64_t ranks, int64_t position, int64_t key, int64_t explore) {
  check_blocks(score, "score");
  Select args =
      checked_select(score, indices, slots, first_slot, phase, run, ranks, position, key, explore);
  if (args.slots == 0) return;
  Launch launch(score);
  const float* scores = const_data<float>(score);
  launch.run(grid_for(args.blocks), select_kernel, args, scores, on_16_bytes(scores));
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, HVD_CUDA_KEY, library) {
  library.impl("select", TORCH_BOX(&hvd_compress::select_cuda));
}
