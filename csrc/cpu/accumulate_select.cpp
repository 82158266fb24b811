// accumulate_select on the CPU: one block at a time, so that its scores never leave the L1 cache.
#include "../accumulate_select.h"

#include <torch/csrc/stable/ops.h>

#include <atomic>

#include "../accumulate_select_rim.h"
#include "isa.h"

namespace hvd_compress {
namespace {

constexpr int kFew = 6;          // up to so many picks, repeated argmax is faster than the search
constexpr int64_t kGrain = 128;  // blocks a thread takes at least
constexpr int32_t kTaken = -1;   // below every score

template <typename T, bool kVelocity>
HVD_BODY bool accumulate_block(T* __restrict grad, float* __restrict residual,
                               float* __restrict velocity, int inside, float scale,
                               float momentum) {
  uint32_t bad = 0;
  for (int i = 0; i < inside; ++i) {
    Entry entry = accumulate<kVelocity>(static_cast<float>(grad[i]), residual[i],
                                        kVelocity ? velocity[i] : 0.0f, scale, momentum);
    residual[i] = entry.residual;
    if (kVelocity) velocity[i] = entry.velocity;
    bad |= !entry.finite;
  }
  memset(static_cast<void*>(grad), 0, inside * sizeof(T));
  return bad;
}

template <typename T>
HVD_BODY void score_block(int32_t* __restrict scores, const float* __restrict residual,
                          const T* __restrict weight, int inside, float floor) {
  for (int i = 0; i < inside; ++i) {
    scores[i] = score_bits(residual[i], static_cast<float>(weight[i]), floor);
  }
  for (int i = inside; i < kBlock; ++i) scores[i] = 0;
}

HVD_BODY void explore_block(int32_t* scores, int64_t block, uint32_t key) {
  for (int i = 0; i < kBlock; ++i) scores[i] = explore_bits(scores[i], block * kBlock + i, key);
}

// Takes the largest `count` times. Picks come out by score: put each in its place by offset.
HVD_BODY void pick_few(int32_t* scores, int count, uint8_t* picked) {
  for (int k = 0; k < count; ++k) {
    int32_t best = kTaken;
    for (int i = 0; i < kBlock; ++i) best = scores[i] > best ? scores[i] : best;
    int32_t where = kBlock;
    for (int32_t i = 0; i < kBlock; ++i) {
      int32_t here = scores[i] == best ? i : kBlock;
      where = here < where ? here : where;
    }
    scores[where] = kTaken;
    int slot = k;
    for (; slot > 0 && picked[slot - 1] > where; --slot) picked[slot] = picked[slot - 1];
    picked[slot] = static_cast<uint8_t>(where);
  }
}

// Finds, bit by bit, the largest threshold that `count` scores reach; the lowest offsets among
// those equal to it fill up what the larger ones leave.
HVD_BODY void pick_many(const int32_t* scores, int count, uint8_t* picked) {
  int32_t threshold = 0;
  for (int bit = 30; bit >= 0; --bit) {
    int32_t candidate = threshold | (1 << bit);
    int32_t reached = 0;
    for (int i = 0; i < kBlock; ++i) reached += scores[i] >= candidate;
    if (reached >= count) threshold = candidate;
    if (reached == count) break;
  }
  int32_t room = count;
  for (int i = 0; i < kBlock; ++i) room -= scores[i] > threshold;
  uint8_t chosen[kBlock + 1];  // written before it is known whether the entry is chosen
  int filled = 0;
  for (int i = 0; i < kBlock; ++i) {
    int equal = (scores[i] == threshold) & (room > 0);
    chosen[filled] = static_cast<uint8_t>(i);
    filled += (scores[i] > threshold) | equal;
    room -= equal;
  }
  memcpy(picked, chosen, count);
}

template <typename T, bool kVelocity>
struct Blocks {
  static HVD_BODY bool run(const AccumulateSelect* args, T* grad, const T* weight, int64_t begin,
                           int64_t end) {
    alignas(64) int32_t scores[kBlock];
    bool bad = false;
    float floor = *args->floor;
    int64_t place = args->slots ? args->place(begin) : 0;
    for (int64_t block = begin; block < end; ++block) {
      int64_t base = block * kBlock;
      int inside = args->inside(block);
      float* residual = args->residual + base;
      float* velocity = kVelocity ? args->velocity + base : nullptr;
      bad |= accumulate_block<T, kVelocity>(grad + base, residual, velocity, inside, args->scale,
                                            args->momentum);
      if (!args->slots) continue;
      int64_t next = args->place(block + 1);
      int count = static_cast<int>(next - place);
      if (count > 0) {  // only a leader reads the weight
        score_block(scores, residual, weight + base, inside, floor);
        if (args->explored(block)) explore_block(scores, block, args->key);
        if (count <= kFew) {
          pick_few(scores, count, args->offsets + place);
        } else {
          pick_many(scores, count, args->offsets + place);
        }
      }
      place = next;
    }
    return bad;
  }
};

template <typename T>
void run(const AccumulateSelect& args, T* grad, const T* weight) {
  std::atomic<bool> bad{false};
  torch::stable::parallel_for(0, args.blocks, kGrain, [&](int64_t begin, int64_t end) {
    bool found = args.velocity ? run_best<Blocks<T, true>>(&args, grad, weight, begin, end)
                               : run_best<Blocks<T, false>>(&args, grad, weight, begin, end);
    if (found) bad.store(true, std::memory_order_relaxed);
  });
  if (bad) *args.invalid |= 1;
}

void accumulate_select_cpu(Tensor grad, Tensor residual, Tensor weight,
                           std::optional<Tensor> velocity, Tensor floor, Tensor offsets,
                           Tensor invalid, double scale, double momentum, int64_t slots,
                           int64_t first_slot, int64_t phase, int64_t run_length, int64_t ranks,
                           int64_t position, int64_t key, int64_t explore) {
  AccumulateSelect args =
      checked(grad, residual, weight, velocity, floor, offsets, invalid, scale, momentum, slots,
              first_slot, phase, run_length, ranks, position, key, explore);
  with_type(grad.scalar_type(), [&](auto type) {
    using T = decltype(type);
    run<T>(args, data<T>(grad), const_data<T>(weight));
  });
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CPU, library) {
  library.impl("accumulate_select", TORCH_BOX(&hvd_compress::accumulate_select_cpu));
}
