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

// `touched` is this piece's flag in the thread block.
template <typename T, bool kVelocity>
__device__ __forceinline__ void accumulate_block(const AccumulateSelect& args,
                                                 const TensorBlock& found, int* touched) {
  const PieceTensor& tensor = found.tensor;
  T* grad = static_cast<T*>(tensor.data);
  int64_t entry = found.block * kBlock;
  int64_t bucket_block = found.piece.first_block + found.block, first = bucket_block * kBlock;
  int inside = tensor.inside(found.block);
  bool grad_aligned = on_16_bytes(grad);
  bool aligned = on_16_bytes(args.residual) && on_16_bytes(args.velocity);

  T grads[kPerLane];  // 0 in the padding
  float step[kPerLane];
  float residual[kPerLane];
  float velocity[kPerLane];
  load(grads, grad + entry, inside, grad_aligned);
  load(residual, args.residual + first, kBlock, aligned);
  if (kVelocity) load(velocity, args.velocity + first, kBlock, aligned);
  float mean = 0.0f;
  if (args.block_means) {
    mean = block_mean(grads, args.scale, inside);
    if (lane_id() == 0) args.block_means[bucket_block] += mean;
  }
  bool bad = false, nonzero = false;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    nonzero |= static_cast<float>(grads[i]) != 0.0f;
    step[i] = static_cast<float>(grads[i]) * args.scale - (index_of(i) < inside ? mean : 0.0f);
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
  if (!args.keeps_gradient()) store(grad + entry, grads, inside, grad_aligned);
  store(args.residual + first, residual, kBlock, aligned);
  if (kVelocity) store(args.velocity + first, velocity, kBlock, aligned);
  if (__any_sync(kAll, bad) && lane_id() == 0) atomicOr(args.invalid, 1);
  // One atomic per thread block: most warps have entries that are not zero.
  if (__any_sync(kAll, nonzero) && lane_id() == 0 && !atomicOr(touched, 1)) {
    atomicOr(args.touched + found.number, 1);
  }
  if (found.piece.slots == 0) return;

  Select select(args.draw, found.piece, found.number);
  LeaderSlots leads = leader_slots(select, found.block, args.indices);
  if (leads.count == 0) return;  // only needed if this rank leads slots
  int32_t scores[kPerLane];
  if (args.floors) {
    const T* weight = static_cast<const T*>(tensor.weight);
    T weights[kPerLane];
    load(weights, weight + entry, inside, on_16_bytes(weight));
    float floor = args.floors[found.number];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      scores[i] = weighted_bits(residual[i], static_cast<float>(weights[i]), floor);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) scores[i] = score_bits(magnitude(residual[i]));
  }
  select_block(select, found.block, scores, leads, args.indices);
}

template <bool kVelocity>
__global__ void __launch_bounds__(kThreads)
    accumulate_select_kernel(const __grid_constant__ AccumulateSelect args,
                             const __grid_constant__ TensorBlocks tensors) {
  HVD_SHARED(int, touched, kWarps);  // a piece's flag is that of its first warp
  if (threadIdx.x < kWarps) touched[threadIdx.x] = 0;
  __syncthreads();
  TensorBlock found;
  if (warp_id() >= tensors.blocks) return;
  if (!find_block(tensors, args.pieces, args.blocks, warp_id(), found)) return;
  int64_t before = found.tensor.first_block - static_cast<int64_t>(blockIdx.x) * kWarps;
  int* flag = touched + max(before, int64_t{0});
  switch (found.tensor.dtype) {
    case ScalarType::Float:
      return accumulate_block<float, kVelocity>(args, found, flag);
    case ScalarType::Half:
      return accumulate_block<Half, kVelocity>(args, found, flag);
    default:
      return accumulate_block<BFloat16, kVelocity>(args, found, flag);
  }
}

void accumulate_select_cuda(Draw draw, std::vector<Tensor> grads, Tensor residual,
                            std::vector<Tensor> weights, std::optional<Tensor> velocity,
                            Tensor pieces, Tensor floors, Tensor indices, Tensor invalid,
                            Tensor touched, std::optional<Tensor> block_means, double scale,
                            double momentum, double decay, bool transform) {
  PieceTensors tensors = checked_tensors(grads, "grads", pieces);
  AccumulateSelect args =
      checked(draw, tensors, residual, weights, velocity, pieces, floors, indices, invalid, touched,
              block_means, scale, momentum, decay, transform);
  if (tensors.blocks == 0) return;
  Launch launch(residual);
  DeviceRows rows(tensors.rows, residual);
  TensorBlocks blocks{rows.data(), pieces.size(0), tensors.blocks};
  auto kernel = args.velocity ? accumulate_select_kernel<true> : accumulate_select_kernel<false>;
  launch.run(grid_for(tensors.blocks), kernel, args, blocks);
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, HVD_CUDA_KEY, library) {
  library.impl("accumulate_select",
               TORCH_BOX(&hvd_compress::DrawLast<&hvd_compress::accumulate_select_cuda>::run));
}
