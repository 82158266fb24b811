// accumulate_select on the CPU: one block at a time, so that its scores stay in the L1 cache.
#include "../accumulate_select.h"

#include <type_traits>

#include "any.h"
#include "hadamard.h"
#include "isa.h"
#include "segments.h"
#include "select.h"

namespace hvd_compress {
namespace {

constexpr int64_t kGrain = 128;  // blocks per thread, at least
constexpr uint32_t kInvalid = 1, kTouched = 2;

// Whether a block has an entry that is neither 0 nor -0. It runs in few blocks: inlined, it would
// slow down the loop that calls it.
template <typename T>
__attribute__((noinline)) bool any_nonzero(const T* grad, int inside) {
  using Word = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
  Word any = 0;
  for (int i = 0; i < inside; ++i) any |= bits_as<Word>(grad[i]);
  return static_cast<Word>(any << 1);  // without the sign
}

// The mean of a block's scaled gradient, by pairwise summation as in the reference.
template <typename T>
HVD_BODY float block_mean(const T* __restrict grad, float scale, int inside) {
  alignas(64) float sums[kBlock];
  for (int i = 0; i < inside; ++i) sums[i] = static_cast<float>(grad[i]) * scale;
  for (int i = inside; i < kBlock; ++i) sums[i] = 0.0f;
  for (int half = kBlock / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return mean_of(sums[0], inside);
}

template <bool kWrite, typename T>
HVD_BODY void fetch(const T* entries) {
  constexpr int kLine = 64 / sizeof(T);
  for (int i = 0; i < kBlock; i += kLine) __builtin_prefetch(entries + i, kWrite);
}

// The transform of a block's scaled gradient. Returns whether an entry may not be transformed.
template <typename T>
HVD_BODY bool transform_block(const T* __restrict grad, float scale, int inside,
                              float* __restrict coefficients) {
  uint32_t bad = 0;
  for (int i = 0; i < inside; ++i) {
    float step = static_cast<float>(grad[i]) * scale;
    bool fits = is_transformable(step);
    coefficients[i] = fits ? step : 0.0f;
    bad |= !fits;
  }
  for (int i = inside; i < kBlock; ++i) coefficients[i] = 0.0f;
  hadamard_block(coefficients);
  return bad;
}

// One loop reads an entry's weight before it writes the residual and the gradient. If the tensors
// have the same offset in their pages, a later read would be delayed by those writes (4K aliasing).
template <bool kVelocity, bool kWeighted, typename T>
HVD_BODY bool accumulate_block(const AccumulateSelect& args, T* __restrict grad, float scale,
                               float* __restrict residual, float* __restrict velocity,
                               const T* __restrict weight, float mean, int32_t* __restrict scores,
                               int inside) {
  float momentum = args.momentum, decay = args.decay, floor = *args.floor;
  uint32_t bad = 0;
  for (int i = 0; i < inside; ++i) {
    float step = static_cast<float>(grad[i]) * scale - mean;
    Entry entry =
        accumulate<kVelocity>(step, residual[i], kVelocity ? velocity[i] : 0.0f, momentum, decay);
    scores[i] = kWeighted ? weighted_bits(entry.residual, static_cast<float>(weight[i]), floor)
                          : score_bits(magnitude(entry.residual));
    residual[i] = entry.residual;
    if (kVelocity) velocity[i] = entry.velocity;
    bad |= !entry.usable;
  }
  if (!args.keeps_gradient()) memset(static_cast<void*>(grad), 0, inside * sizeof(T));
  for (int i = inside; i < kBlock; ++i) scores[i] = 0;
  return bad;
}

template <typename T, bool kVelocity>
struct Blocks {
  static HVD_BODY uint32_t run(const AccumulateSelect* args, T* grad, const T* weight,
                               int64_t begin, int64_t end) {
    alignas(64) int32_t scores[kBlock];
    alignas(64) float coefficients[kBlock];
    float scale = args->scale;
    bool bad = false, touched = false;
    const Select& select = args->select;
    auto first_index_of = [&](int64_t block) {
      return select.slots ? select.first_index(block) : 0;
    };
    int64_t place = first_index_of(begin), next = first_index_of(begin + 1);
    const Deferred& deferred = args->deferred;
    SlotIterator iterator(deferred.segment, begin, deferred.shift);
    auto update_block = [&](int64_t block) {
      auto [slot, last] = iterator.next();
      for (; slot < last; ++slot) {
        if (deferred.update.applies(slot))
          deferred.update.write(slot, block * kBlock + deferred.indices[slot]);
      }
    };
    update_block(begin);
    for (int64_t block = begin; block < end; ++block) {
      int64_t base = block * kBlock;
      int inside = args->inside(block);
      int64_t after = next;
      if (block + 1 < end) {
        // Prefetch the next block during the selection in this one.
        after = first_index_of(block + 2);
        if (args->inside(block + 1) == kBlock) {
          fetch<false>(grad + base + kBlock);
          fetch<true>(args->residual + base + kBlock);
          if (kVelocity) fetch<true>(args->velocity + base + kBlock);
          if (weight && after > next) fetch<false>(weight + base + kBlock);
        }
      }
      float* residual = args->residual + base;
      float* velocity = kVelocity ? args->velocity + base : nullptr;
      int count = static_cast<int>(next - place);
      if (!touched) touched = any_nonzero(grad + base, inside);
      float mean = 0.0f;
      if (args->block_means) {
        mean = block_mean(grad + base, scale, inside);
        args->block_means[block] += mean;
      }
      if (args->transform) {
        bad |= transform_block(grad + base, scale, inside, coefficients);
        const float* no_weight = nullptr;
        bad |= accumulate_block<kVelocity, false>(*args, coefficients, 1.0f, residual, velocity,
                                                  no_weight, mean, scores, kBlock);
      } else if (weight && count > 0) {  // only needed if this rank leads slots
        bad |= accumulate_block<kVelocity, true>(*args, grad + base, scale, residual, velocity,
                                                 weight + base, mean, scores, inside);
      } else {
        bad |= accumulate_block<kVelocity, false>(*args, grad + base, scale, residual, velocity,
                                                  weight, mean, scores, inside);
      }
      // Now, and not when the next block is read: a vector load just after narrower stores is slow.
      if (block + 1 < end) update_block(block + 1);
      if (count > 0) select_block(select, block, scores, count, select.indices + place);
      place = next;
      next = after;
    }
    return (bad ? kInvalid : 0) | (touched ? kTouched : 0);
  }
};

template <typename T>
void run(const AccumulateSelect& args, T* grad, const T* weight) {
  uint32_t found = any_part(args.select.blocks, kGrain, [&](int64_t begin, int64_t end) {
    return args.velocity ? run_best<Blocks<T, true>>(&args, grad, weight, begin, end)
                         : run_best<Blocks<T, false>>(&args, grad, weight, begin, end);
  });
  if (found & kInvalid) *args.invalid |= 1;
  if (found & kTouched) *args.touched |= 1;
}

void accumulate_select_cpu(Tensor grad, Tensor residual, std::optional<Tensor> weight,
                           std::optional<Tensor> velocity, Tensor floor, Tensor indices,
                           Tensor invalid, Tensor touched, std::optional<Tensor> block_means,
                           double scale, double momentum, int64_t slots, int64_t first_slot,
                           int64_t phase, int64_t run_length, int64_t ranks, int64_t position,
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
  args.select = checked_select(residual, indices, slots, first_slot, phase, run_length, ranks,
                               position, key, explore);
  with_type(grad.scalar_type(), [&](auto type) {
    using T = decltype(type);
    run<T>(args, data<T>(grad), weight ? const_data<T>(*weight) : nullptr);
  });
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CPU, library) {
  library.impl("accumulate_select", TORCH_BOX(&hvd_compress::accumulate_select_cpu));
}
