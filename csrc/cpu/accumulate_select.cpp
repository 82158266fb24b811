// accumulate_select on the CPU: one block at a time, so that its scores stay in the L1 cache.
#include "../accumulate_select.h"

#include <torch/csrc/stable/ops.h>

#include <atomic>

#include "convert.h"
#include "hadamard.h"
#include "isa.h"
#include "pieces.h"
#include "select.h"

namespace hvd_compress {
namespace {

constexpr int64_t kGrain = 128;  // blocks per thread, at least
constexpr uint32_t kInvalid = 1, kTouched = 2;

// The mean of a block, by pairwise summation as in the reference.
HVD_BODY float block_mean(const float* __restrict steps, int inside) {
  alignas(64) float sums[kBlock / 2];
  for (int i = 0; i < kBlock / 2; ++i) sums[i] = steps[i] + steps[i + kBlock / 2];
  for (int half = kBlock / 4; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return mean_of(sums[0], inside);
}

// Transforms a block's scaled gradient. Returns kInvalid if an entry may not be transformed.
HVD_BODY uint32_t transform_block(float* steps) {
  uint32_t bad = 0;
  for (int i = 0; i < kBlock; ++i) {
    bool fits = is_transformable(steps[i]);
    steps[i] = fits ? steps[i] : 0.0f;
    bad |= !fits;
  }
  hadamard_block(steps);
  return bad ? kInvalid : 0;
}

enum class Score { kNone, kMagnitude, kWeighted };

// One loop reads an entry's weight before it writes the residual. If the tensors have the same
// offset in their pages, a later read would be delayed by those writes (4K aliasing).
template <bool kVelocity, Score kScore>
HVD_BODY uint32_t accumulate_block(const AccumulateSelect& args, const float* __restrict steps,
                                   float scale, float* __restrict residual,
                                   float* __restrict velocity, const float* __restrict weights,
                                   float floor, int32_t* __restrict scores) {
  float momentum = args.momentum, decay = args.decay;
  uint32_t bad = 0, any = 0;
  for (int i = 0; i < kBlock; ++i) {
    any |= bits_as<uint32_t>(steps[i]);
    Entry entry = accumulate<kVelocity>(steps[i] * scale, residual[i],
                                        kVelocity ? velocity[i] : 0.0f, momentum, decay);
    if (kScore == Score::kMagnitude) scores[i] = score_bits(magnitude(entry.residual));
    if (kScore == Score::kWeighted) scores[i] = weighted_bits(entry.residual, weights[i], floor);
    residual[i] = entry.residual;
    if (kVelocity) velocity[i] = entry.velocity;
    bad |= !entry.usable;
  }
  return (bad ? kInvalid : 0) | (any << 1 ? kTouched : 0);  // without the sign
}

template <bool kWrite>
HVD_BODY void fetch(const void* memory, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) {
    __builtin_prefetch(static_cast<const char*>(memory) + i, kWrite);
  }
}

HVD_BODY char* at(const void* data, int64_t offset) {
  return static_cast<char*>(const_cast<void*>(data)) + offset;
}

HVD_BODY void fetch_block(const PieceTensor& tensor, int64_t block, bool weighted) {
  int64_t offset = block * kBlock * tensor.entry_size();
  int64_t bytes = tensor.inside(block) * tensor.entry_size();
  fetch<false>(at(tensor.data, offset), bytes);
  if (weighted) fetch<false>(at(tensor.weight, offset), bytes);
}

// The blocks `begin` to `end` of one piece. `after`: the tensor of the next piece, or null.
template <bool kVelocity>
struct Blocks {
  static HVD_BODY uint32_t run(const AccumulateSelect* args, const PieceTensor* tensor,
                               const PieceTensor* after, int64_t number, int64_t begin,
                               int64_t end) {
    alignas(64) int32_t scores[kBlock];
    alignas(64) float converted[kBlock], weights[kBlock];
    const Piece& piece = args->pieces[number];
    const bool plain = tensor->dtype == ScalarType::Float;
    const float floor = args->floors ? args->floors[number] : 0.0f;
    Select select(args->draw, piece, number);
    auto first_index_of = [&](int64_t block) {
      return piece.slots ? select.first_index(block) : 0;
    };
    uint32_t found = 0;
    int64_t place = first_index_of(begin), next = first_index_of(begin + 1), later = next;
    for (int64_t block = begin; block < end; ++block, place = next, next = later) {
      int64_t offset = block * kBlock * tensor->entry_size();
      int64_t bucket_block = piece.first_block + block;
      char* grad = at(tensor->data, offset);
      float* residual = args->residual + bucket_block * kBlock;
      float* velocity = kVelocity ? args->velocity + bucket_block * kBlock : nullptr;
      // Prefetch the next block during the selection in this one.
      if (block + 1 < end) {
        later = first_index_of(block + 2);
        fetch_block(*tensor, block + 1, tensor->weight && later > next);
      } else if (after) {
        fetch_block(*after, 0, after->weight);
      }
      fetch<true>(residual + kBlock, kBlock * sizeof(float));
      if (kVelocity) fetch<true>(velocity + kBlock, kBlock * sizeof(float));
      int inside = tensor->inside(block), count = static_cast<int>(next - place);
      const float* steps = reinterpret_cast<const float*>(grad);
      float scale = args->scale;
      uint32_t counts = kInvalid | kTouched;  // of what accumulate_block finds
      if (!plain || args->keeps_gradient() || inside < kBlock) {
        found |= convert(grad, tensor->dtype, inside, converted) ? kTouched : 0;
        steps = converted;
      }
      if (args->keeps_gradient()) {
        for (int i = 0; i < kBlock; ++i) converted[i] *= scale;
        if (args->transform) {
          found |= transform_block(converted);
        } else {
          float mean = block_mean(converted, inside);
          for (int i = 0; i < inside; ++i) converted[i] -= mean;
          args->block_means[bucket_block] += mean;
        }
        scale = 1.0f;
        counts = kInvalid;
      }
      auto accumulate = [&](auto score, const float* weight) HVD_INLINE {
        found |= counts & accumulate_block<kVelocity, score()>(*args, steps, scale, residual,
                                                               velocity, weight, floor, scores);
      };
      if (count == 0) {
        accumulate(std::integral_constant<Score, Score::kNone>(), nullptr);
      } else if (!tensor->weight) {
        accumulate(std::integral_constant<Score, Score::kMagnitude>(), nullptr);
      } else if (plain && inside == kBlock) {
        accumulate(std::integral_constant<Score, Score::kWeighted>(),
                   reinterpret_cast<const float*>(at(tensor->weight, offset)));
      } else {
        convert(at(tensor->weight, offset), tensor->dtype, inside, weights);
        accumulate(std::integral_constant<Score, Score::kWeighted>(), weights);
      }
      if (!args->keeps_gradient()) memset(grad, 0, inside * tensor->entry_size());
      if (count > 0) select_block(select, block, scores, count, args->indices.data + place);
    }
    return found;
  }
};

void set(int32_t& flag) { std::atomic_ref(flag).store(1, std::memory_order_relaxed); }

void accumulate_select_cpu(Draw draw, std::vector<Tensor> grads, Tensor residual,
                           std::vector<Tensor> weights, std::optional<Tensor> velocity,
                           Tensor pieces, Tensor floors, Tensor indices, Tensor invalid,
                           Tensor touched, std::optional<Tensor> block_means, double scale,
                           double momentum, double decay, bool transform) {
  PieceTensors tensors = checked_tensors(grads, "grads", pieces);
  AccumulateSelect args =
      checked(draw, tensors, residual, weights, velocity, pieces, floors, indices, invalid, touched,
              block_means, scale, momentum, decay, transform);
  check_selection(args.draw, args.pieces, tensors, args.blocks, args.indices);
  torch::stable::parallel_for(0, tensors.blocks, kGrain, [&](int64_t begin, int64_t end) {
    auto work = [&](int64_t number, int64_t first, int64_t last) {
      const PieceTensor* tensor = &tensors.rows[number];
      const PieceTensor* after = number + 1 < pieces.size(0) ? tensor + 1 : nullptr;
      uint32_t found = args.velocity
                           ? run_best<Blocks<true>>(&args, tensor, after, number, first, last)
                           : run_best<Blocks<false>>(&args, tensor, after, number, first, last);
      if (found & kInvalid) set(*args.invalid);
      if (found & kTouched) set(args.touched[number]);
    };
    for_parts(tensors.rows.data(), tensors.rows.size(), begin, end, work);
  });
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CPU, library) {
  library.impl("accumulate_select",
               TORCH_BOX(&hvd_compress::DrawLast<&hvd_compress::accumulate_select_cpu>::run));
}
