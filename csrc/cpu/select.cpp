// select on the CPU.
#include "select.h"

#include <torch/csrc/stable/ops.h>

#include "../select.h"
#include "isa.h"

namespace hvd_compress {
namespace {

constexpr int64_t kGrain = 128;  // blocks per thread, at least

struct Blocks {
  static HVD_BODY void run(const Select* args, const float* score, int64_t begin, int64_t end) {
    alignas(64) int32_t scores[kBlock];
    int64_t place = args->first_index(begin);
    for (int64_t block = begin; block < end; ++block) {
      int64_t next = args->first_index(block + 1);
      int count = static_cast<int>(next - place);
      if (count > 0) {  // only needed if this rank leads slots
        for (int i = 0; i < kBlock; ++i) scores[i] = score_bits(score[block * kBlock + i]);
        select_block(*args, block, scores, count, args->indices + place);
      }
      place = next;
    }
  }
};

void select_cpu(Tensor score, Tensor indices, int64_t slots, int64_t first_slot, int64_t phase,
                int64_t run_length, int64_t ranks, int64_t position, int64_t key, int64_t explore) {
  check_blocks(score, "score");
  Select args = checked_select(score, indices, slots, first_slot, phase, run_length, ranks,
                               position, key, explore);
  if (args.slots == 0) return;
  const float* scores = const_data<float>(score);
  torch::stable::parallel_for(0, args.blocks, kGrain, [&](int64_t begin, int64_t end) {
    run_best<Blocks>(&args, scores, begin, end);
  });
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CPU, library) {
  library.impl("select", TORCH_BOX(&hvd_compress::select_cpu));
}
