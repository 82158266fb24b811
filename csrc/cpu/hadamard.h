// The Walsh-Hadamard transform of one block on the CPU: the specification is
// hvd_compress/reference/hadamard.py.
#pragma once

#include "../block.h"

namespace hvd_compress {

struct Unchanged {
  HVD_BODY float operator()(float value) const { return value; }
};

struct Normalised {
  HVD_BODY float operator()(float value) const { return value * (1.0f / kGain); }
};

// Two of the transform's eight stages, those of the two lowest bits of the position. The results
// are written a quarter of a block apart, which rotates the position by two bits: the same loop
// serves all stages.
template <typename To, typename Finish>
HVD_BODY void combine_two_bits(const float* __restrict from, To* __restrict to, Finish finish) {
  constexpr int kQuarter = kBlock / 4;
  for (int i = 0; i < kQuarter; ++i) {
    float sum = from[4 * i] + from[4 * i + 1], difference = from[4 * i] - from[4 * i + 1];
    float next_sum = from[4 * i + 2] + from[4 * i + 3];
    float next_difference = from[4 * i + 2] - from[4 * i + 3];
    to[i] = finish(sum + next_sum);
    to[i + kQuarter] = finish(difference + next_difference);
    to[i + 2 * kQuarter] = finish(sum - next_sum);
    to[i + 3 * kQuarter] = finish(difference - next_difference);
  }
}

// Writes finish(16 times each coefficient) to `to`, which may be `values`.
template <typename To, typename Finish>
HVD_BODY void hadamard_block(const float* values, To* to, Finish finish) {
  alignas(64) float one[kBlock];
  alignas(64) float other[kBlock];
  combine_two_bits(values, one, Unchanged{});
  combine_two_bits(one, other, Unchanged{});
  combine_two_bits(other, one, Unchanged{});
  combine_two_bits(one, to, finish);
}

HVD_BODY void hadamard_block(float* values) { hadamard_block(values, values, Normalised{}); }

}  // namespace hvd_compress
