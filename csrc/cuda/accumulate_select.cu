// accumulate_select on CUDA: a warp to a block, 8 neighbouring entries to a lane, all in registers.
#include "../accumulate_select_rim.h"
#include "warp.h"

namespace hvd_compress {
namespace {

constexpr int kFew = 8;         // up to so many picks, repeated argmax is faster than the search
constexpr int32_t kTaken = -1;  // below every score

// 16 bytes at a time where the memory allows it; zeros beyond `inside`.
template <typename T>
__device__ __forceinline__ void load(T (&to)[kEach], const T* from, int inside, bool aligned) {
  if (aligned && inside == kEach) {
    uint4 words[sizeof(to) / sizeof(uint4)];
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(to) / sizeof(uint4)); ++i) {
      words[i] = reinterpret_cast<const uint4*>(from)[i];
    }
    memcpy(static_cast<void*>(to), words, sizeof(to));
  } else {
#pragma unroll
    for (int i = 0; i < kEach; ++i) to[i] = i < inside ? from[i] : static_cast<T>(0.0f);
  }
}

template <typename T>
__device__ __forceinline__ void store(T* to, const T (&from)[kEach], int inside, bool aligned) {
  if (aligned && inside == kEach) {
    uint4 words[sizeof(from) / sizeof(uint4)];
    memcpy(words, static_cast<const void*>(from), sizeof(from));
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(from) / sizeof(uint4)); ++i) {
      reinterpret_cast<uint4*>(to)[i] = words[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (i < inside) to[i] = from[i];
    }
  }
}

// Both return, as bits, which of this lane's entries are picked. The lanes hold the block in order
// of offset, so "the lowest offset" is the lowest lane and then the lowest bit.

// Takes the largest `count` times.
__device__ __forceinline__ unsigned pick_few(int32_t (&scores)[kEach], int count) {
  unsigned picked = 0;
  for (int k = 0; k < count; ++k) {
    int32_t best = kTaken;
#pragma unroll
    for (int i = 0; i < kEach; ++i) best = max(best, scores[i]);
    int32_t top = __reduce_max_sync(kAll, best);
    bool mine = lane_id() == __ffs(__ballot_sync(kAll, best == top)) - 1;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (mine && scores[i] == top) {
        scores[i] = kTaken;
        picked |= 1u << i;
        mine = false;
      }
    }
  }
  return picked;
}

// Finds, bit by bit, the largest threshold that `count` scores reach; the lowest offsets among
// those equal to it fill up what the larger ones leave.
__device__ __forceinline__ unsigned pick_many(const int32_t (&scores)[kEach], int count) {
  int32_t threshold = 0;
  for (int bit = 30; bit >= 0; --bit) {
    int32_t candidate = threshold | (1 << bit);
    int reached = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) reached += scores[i] >= candidate;
    reached = __reduce_add_sync(kAll, reached);
    if (reached >= count) threshold = candidate;
    if (reached == count) break;
  }
  int larger = 0, equal = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    larger += scores[i] > threshold;
    equal += scores[i] == threshold;
  }
  int room = count - __reduce_add_sync(kAll, larger) - sum_before(equal);
  unsigned picked = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (scores[i] > threshold || (scores[i] == threshold && room-- > 0)) picked |= 1u << i;
  }
  return picked;
}

template <typename T, bool kVelocity>
__global__ void __launch_bounds__(kThreads)
    accumulate_select_kernel(const __grid_constant__ AccumulateSelect args, T* __restrict__ grad,
                             const T* __restrict__ weight, bool aligned) {
  int64_t block = warp_id();
  if (block >= args.blocks) return;
  int64_t first = block * kBlock + lane_id() * kEach;
  int inside = args.inside(block) - lane_id() * kEach;  // of this lane's entries, may be < 0
  inside = inside < 0 ? 0 : inside > kEach ? kEach : inside;

  T step[kEach];
  float residual[kEach];
  float velocity[kEach];
  load(step, grad + first, inside, aligned);
  load(residual, args.residual + first, inside, aligned);
  if (kVelocity) load(velocity, args.velocity + first, inside, aligned);
  bool bad = false;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    Entry entry = accumulate<kVelocity>(static_cast<float>(step[i]), residual[i],
                                        kVelocity ? velocity[i] : 0.0f, args.scale, args.momentum);
    bad |= !entry.finite;  // padding was loaded as zeros, which are finite
    residual[i] = entry.residual;
    velocity[i] = entry.velocity;
    step[i] = static_cast<T>(0.0f);
  }
  store(grad + first, step, inside, aligned);
  store(args.residual + first, residual, inside, aligned);
  if (kVelocity) store(args.velocity + first, velocity, inside, aligned);
  if (__any_sync(kAll, bad) && lane_id() == 0) atomicOr(args.invalid, 1);
  if (!args.slots) return;

  // 64-bit divisions are slow here: even lanes find this block's place, odd ones the next one's.
  int64_t edge = args.place(block + lane_id() % 2);
  int64_t place = __shfl_sync(kAll, edge, 0);
  int count = static_cast<int>(__shfl_sync(kAll, edge, 1) - place);
  if (count == 0) return;  // only a leader reads the weight

  T weights[kEach];
  int32_t scores[kEach];
  load(weights, weight + first, inside, aligned);
  float floor = *args.floor;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    scores[i] = i < inside ? score_bits(residual[i], static_cast<float>(weights[i]), floor) : 0;
  }
  if (args.explored(block)) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) scores[i] = explore_bits(scores[i], first + i, args.key);
  }
  unsigned picked = count <= kFew ? pick_few(scores, count) : pick_many(scores, count);
  uint8_t* out = args.offsets + place + sum_before(__popc(picked));
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (picked >> i & 1) *out++ = static_cast<uint8_t>(lane_id() * kEach + i);
  }
}

bool on_16_bytes(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

void accumulate_select_cuda(Tensor grad, Tensor residual, Tensor weight,
                            std::optional<Tensor> velocity, Tensor floor, Tensor offsets,
                            Tensor invalid, double scale, double momentum, int64_t slots,
                            int64_t first_slot, int64_t phase, int64_t run, int64_t ranks,
                            int64_t position, int64_t key, int64_t explore) {
  AccumulateSelect args =
      checked(grad, residual, weight, velocity, floor, offsets, invalid, scale, momentum, slots,
              first_slot, phase, run, ranks, position, key, explore);
  if (args.blocks == 0) return;
  Launch launch(residual);
  with_type(grad.scalar_type(), [&](auto type) {
    using T = decltype(type);
    T* grad_data = data<T>(grad);
    const T* weight_data = const_data<T>(weight);
    bool aligned = on_16_bytes(grad_data) && on_16_bytes(weight_data) &&
                   on_16_bytes(args.residual) && on_16_bytes(args.velocity);
    auto kernel =
        args.velocity ? accumulate_select_kernel<T, true> : accumulate_select_kernel<T, false>;
    kernel<<<grid_for(args.blocks), kThreads, 0, launch.stream()>>>(args, grad_data, weight_data,
                                                                    aligned);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CUDA, library) {
  library.impl("accumulate_select", TORCH_BOX(&hvd_compress::accumulate_select_cuda));
}
