// accumulate_select on CUDA: one warp per block, with 8 entries per lane in registers.
#include "../accumulate_select.h"
#include "hadamard.h"
#include "pieces.h"
#include "select.h"

namespace hvd_compress {
namespace {

// The mean of a block's scaled gradient, in all lanes. By pairwise summation as in the reference:
// entries 128 apart are in one lane, entries 64 to 4 apart in different lanes, entries 2 and 1
// apart in one lane.
template <typename T>
__device__ __forceinline__ float block_mean(const T (&grad)[kPerLane], float scale, int inside) {
  float sums[kAdjacent];
#pragma unroll
  for (int i = 0; i < kAdjacent; ++i) {
    sums[i] = static_cast<float>(grad[i]) * scale + static_cast<float>(grad[i + kAdjacent]) * scale;
#pragma unroll
    for (int half = kLanes / 2; half > 0; half /= 2) {
      sums[i] += __shfl_xor_sync(kAll, sums[i], half);
    }
  }
#pragma unroll
  for (int half = kAdjacent / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return mean_of(sums[0], inside);
}

template <typename T, bool kVelocity>
__global__ void __launch_bounds__(kThreads)
    accumulate_select_kernel(const __grid_constant__ AccumulateSelect args, T* __restrict__ grad,
                             const T* __restrict__ weight, bool aligned) {
  HVD_SHARED(int, touched, 1);  // by this thread block
  if (threadIdx.x == 0) *touched = 0;
  __syncthreads();
  int64_t block = warp_id();
  if (block >= args.select.blocks) return;
  int64_t first = block * kBlock;
  int inside = args.inside(block);
  int used = args.transform ? kBlock : inside;  // of the residual

  T grads[kPerLane];  // 0 in the padding
  float step[kPerLane];
  float residual[kPerLane];
  float velocity[kPerLane];
  load(grads, grad + first, inside, aligned);  // in flight during the deferred update
  const Deferred& deferred = args.deferred;
  if (deferred.piece.slots) {
    update_residual(deferred.update, deferred.indices,
                    slots_in(deferred.piece, block, deferred.shift), first);
  }
  load(residual, args.residual + first, used, aligned);
  if (kVelocity) load(velocity, args.velocity + first, used, aligned);
  float mean = 0.0f;
  if (args.block_means) {
    mean = block_mean(grads, args.scale, inside);
    if (lane_id() == 0) args.block_means[block] += mean;
  }
  bool bad = false, nonzero = false;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    nonzero |= static_cast<float>(grads[i]) != 0.0f;
    step[i] = static_cast<float>(grads[i]) * args.scale - mean;
    if (args.transform && !is_transformable(step[i])) {
      step[i] = 0.0f;
      bad = true;
    }
  }
  if (args.transform) hadamard_block(step);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    Entry entry = accumulate<kVelocity>(step[i], residual[i], kVelocity ? velocity[i] : 0.0f,
                                        args.momentum, args.decay);
    bad |= !entry.usable;
    residual[i] = entry.residual;
    velocity[i] = entry.velocity;
    grads[i] = static_cast<T>(0.0f);
  }
  if (!args.keeps_gradient()) store(grad + first, grads, inside, aligned);
  store(args.residual + first, residual, used, aligned);
  if (kVelocity) store(args.velocity + first, velocity, used, aligned);
  if (__any_sync(kAll, bad) && lane_id() == 0) atomicOr(args.invalid, 1);
  // One atomic per thread block: most warps have entries that are not zero.
  if (__any_sync(kAll, nonzero) && lane_id() == 0 && !atomicOr(touched, 1)) {
    atomicOr(args.touched, 1);
  }
  if (!args.select.slots) return;

  LeaderSlots leads = leader_slots(args.select, block);
  if (leads.count == 0) return;  // only needed if this rank leads slots
  int32_t scores[kPerLane];
  if (weight) {
    T weights[kPerLane];
    load(weights, weight + first, inside, aligned);
    float floor = *args.floor;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      float width = static_cast<float>(weights[i]);
      scores[i] = index_of(i) < inside ? weighted_bits(residual[i], width, floor) : 0;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      scores[i] = index_of(i) < used ? score_bits(magnitude(residual[i])) : 0;
    }
  }
  select_block(args.select, block, scores, leads);
}

void accumulate_select_cuda(Tensor grad, Tensor residual, std::optional<Tensor> weight,
                            std::optional<Tensor> velocity, Tensor floor, Tensor indices,
                            Tensor invalid, Tensor touched, std::optional<Tensor> block_means,
                            double scale, double momentum, int64_t slots, int64_t first_slot,
                            int64_t phase, int64_t run, int64_t ranks, int64_t position,
                            int64_t key, int64_t explore, std::optional<Tensor> deferred_indices,
                            std::optional<Tensor> deferred_mean,
                            std::optional<Tensor> deferred_error, int64_t deferred_slots,
                            int64_t deferred_first_slot, int64_t deferred_phase, double decay,
                            bool transform) {
  AccumulateSelect args = checked(grad, residual, weight, velocity, floor, invalid, touched,
                                  block_means, scale, momentum, decay, transform);
  args.deferred =
      checked_deferred(residual, velocity, indices, deferred_indices, deferred_mean, deferred_error,
                       deferred_slots, deferred_first_slot, deferred_phase);
  args.select = checked_select(residual, indices, slots, first_slot, phase, run, ranks, position,
                               key, explore);
  if (args.select.blocks == 0) return;
  Launch launch(residual);
  with_type(grad.scalar_type(), [&](auto type) {
    using T = decltype(type);
    T* grad_data = data<T>(grad);
    const T* weight_data = weight ? const_data<T>(*weight) : nullptr;
    bool aligned = on_16_bytes(grad_data) && on_16_bytes(weight_data) &&
                   on_16_bytes(args.residual) && on_16_bytes(args.velocity);
    auto kernel =
        args.velocity ? accumulate_select_kernel<T, true> : accumulate_select_kernel<T, false>;
    launch.run(grid_for(args.select.blocks), kernel, args, grad_data, weight_data, aligned);
  });
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, HVD_CUDA_KEY, library) {
  library.impl("accumulate_select", TORCH_BOX(&hvd_compress::accumulate_select_cuda));
}
