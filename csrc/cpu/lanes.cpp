// lanes_encode and lanes_decode on the CPU, in chunks of words, so that digits stay in the L1
// cache.
#include "../lanes.h"

#include "codes.h"

namespace hvd_compress {
namespace {

constexpr int kWords = 64;  // per chunk: whole vectors for any number of lanes

// Joins the digits of a chunk into words. Digits are unsigned: half a lane's range was added. The
// digits in 8 bytes (one of 64 bits) become fields together: a part of the word.
template <typename Digit>
class Joiner {
 public:
  static constexpr int kPer = sizeof(uint64_t) / sizeof(Digit);
  static constexpr int kLanes = sizeof(Digit) == 1 ? 32 : sizeof(Digit) == 2 ? 7 : 3;  // at most
  static constexpr int kParts = (kLanes + kPer - 1) / kPer;

  HVD_BODY explicit Joiner(const Lanes& args)
      : lanes_(args.count), width_(args.width), bias_(args.bias()) {}

  HVD_BODY void plain(const Digit* digits, int64_t* words) const {
    alignas(64) uint64_t loaded[kWords], sums[kWords];
    for (int i = 0; i < kWords; ++i) sums[i] = -bias_;
    for (int part = 0; part * kPer < lanes_; ++part) {
      for (int i = 0; i < kWords; ++i) loaded[i] = load_word(digits + i * lanes_ + part * kPer);
      for (int i = 0; i < kWords; ++i) {
        sums[i] += fold(loaded[i] & inside(part), width_, Digit()) << (part * kPer * width_);
      }
    }
    memcpy(words, sums, sizeof(sums));
  }

#ifdef HVD_V4
  HVD_V4 void wide(const Digit* digits, int64_t* words) const {
    switch ((lanes_ + kPer - 1) / kPer) {
      case 1:
        return wide_parts<1>(digits, words);
      case 2:
        return wide_parts<2>(digits, words);
      case 3:
        return wide_parts<3>(digits, words);
      case 4:
        return wide_parts<4>(digits, words);
    }
  }
#endif

 private:
  HVD_BODY uint64_t inside(int part) const {
    return low_bits((lanes_ - part * kPer) * 8 * static_cast<int>(sizeof(Digit)));
  }

#ifdef HVD_V4
  template <int kCount>
  HVD_V4 void wide_parts(const Digit* digits, int64_t* words) const {
    uint64_t masks[kCount], bias = bias_;
    for (int part = 0; part < kCount; ++part) {
      masks[part] = digit_mask<Digit>(width_) & inside(part);
    }
    int lanes = lanes_, shift = kPer * width_;
#pragma GCC unroll 4
    for (int i = 0; i < kWords; ++i, digits += lanes) {
      uint64_t word = fold_wide(digits + (kCount - 1) * kPer, masks[kCount - 1]);
      for (int part = kCount - 2; part >= 0; --part) {
        word = (word << shift) + fold_wide(digits + part * kPer, masks[part]);
      }
      words[i] = static_cast<int64_t>(word - bias);
    }
  }
#endif

  int lanes_;
  int width_;
  uint64_t bias_;
};

template <typename Digit, bool kStochastic>
HVD_BODY void encode_run(const Lanes& args, int64_t group, int64_t first,
                         const float* __restrict values, float* __restrict error,
                         Digit* __restrict digits, int count) {
  Grid grid(args, group);
  uint32_t half = uint32_t{1} << (args.width - 1);
  uint32_t key = args.key, start = static_cast<uint32_t>(first);
  for (int i = 0; i < count; ++i) {
    float draw = kStochastic ? uniform(start + static_cast<uint32_t>(i), key) : 0.5f;
    Rounded rounded = grid.encode(values[i], draw);
    digits[i] = static_cast<Digit>(static_cast<uint32_t>(rounded.digit) + half);
    error[i] = rounded.error;
  }
}

// EncodeWords and DecodeWords process the words `begin` to `end`.

template <typename Digit, bool kStochastic, bool kWide>
struct EncodeWords {
  static HVD_BODY void run(const Lanes* args, const float* values, float* error, int64_t* words,
                           int64_t begin, int64_t end) {
    alignas(64) Digit digits[kWords * Joiner<Digit>::kLanes + Joiner<Digit>::kPer] = {};
    alignas(64) int64_t joined[kWords];
    Joiner<Digit> join(*args);
    int64_t group = args->groups.find(begin * args->count);
    for (; begin < end; begin += kWords) {
      int64_t size = end - begin < kWords ? end - begin : kWords;
      int64_t first = begin * args->count, last = first + size * args->count;
      for (; last > args->size; --last) digits[last - 1 - first] = Digit{1} << (args->width - 1);
      for_runs(args->groups, group, first, last,
               [&](int64_t group, int64_t from, int64_t to) HVD_INLINE {
                 encode_run<Digit, kStochastic>(*args, group, from, values + from, error + from,
                                                digits + (from - first),
                                                static_cast<int>(to - from));
               });
      if constexpr (kWide && sizeof(Digit) < sizeof(uint64_t)) {
        join.wide(digits, joined);
      } else {
        join.plain(digits, joined);
      }
      memcpy(words + begin, joined, size * sizeof(int64_t));
    }
  }
};

// Splits words into digits: the inverse of Joiner.
template <typename D>
class Splitter {
 public:
  using Digit = D;

  HVD_BODY explicit Splitter(const Lanes& args)
      : lanes_(args.count), width_(args.width), bias_(args.bias()) {}

  // Writes the digits of a part at once; those beyond the last lane are overwritten by the next
  // word's.
  HVD_BODY void split(const int64_t* words, int size, Digit* digits) const {
    constexpr int kPer = Joiner<Digit>::kPer;
    alignas(64) uint64_t biased[kWords] = {}, parts[Joiner<Digit>::kParts][kWords];
    memcpy(biased, words, size * sizeof(uint64_t));
    for (int i = 0; i < kWords; ++i) biased[i] += bias_;
    int count = (lanes_ + kPer - 1) / kPer;
    for (int part = 0; part < count; ++part) {
      int shift = part * kPer * width_;
      for (int i = 0; i < kWords; ++i) {
        parts[part][i] = unfold((biased[i] >> shift) & low_bits(kPer * width_), width_, Digit());
      }
    }
    for (int i = 0; i < size; ++i, digits += lanes_) {
      for (int part = 0; part < count; ++part) {
        memcpy(digits + part * kPer, &parts[part][i], sizeof(uint64_t));
      }
    }
  }

 private:
  int lanes_;
  int width_;
  uint64_t bias_;
};

#ifdef HVD_V4
class WideLanes {
 public:
  using Digit = uint16_t;

  explicit WideLanes(const Lanes& args)
      : lanes_(args.count), bias_(args.bias()), fields_(args.width, [&](int i) {
          return i / args.count * 64 + i % args.count * args.width;
        }) {}

  // Writes 16 digits at a time; those beyond the last lane are overwritten by the next word's.
  HVD_V4 void split(const int64_t* words, int size, uint16_t* digits) const {
    FieldReader read(fields_);
    int step = lanes_ < 16 ? 16 / lanes_ : 1;
    for (int i = 0; i < size; i += step, digits += step * lanes_) {
      __mmask8 inside = static_cast<__mmask8>(size - i < 8 ? (1 << (size - i)) - 1 : 0xFF);
      __m512i biased = _mm512_add_epi64(_mm512_maskz_loadu_epi64(inside, words + i),
                                        _mm512_set1_epi64(static_cast<int64_t>(bias_)));
      for (int lane = 0; lane < lanes_; lane += 16) {
        store_digits(digits + lane, read(biased, lane / 16 * fields_.bits), 16);
      }
    }
  }

 private:
  int lanes_;
  uint64_t bias_;
  Fields fields_;
};
#endif

template <typename Splitting>
struct DecodeWords {
  static HVD_BODY void run(const Lanes* args, const int64_t* words, float* values, int64_t begin,
                           int64_t end) {
    using Digit = typename Splitting::Digit;
    alignas(64) Digit digits[kWords * 32 + 32];
    Splitting splitting(*args);
    uint32_t half = uint32_t{1} << (args->width - 1);
    int64_t group = args->groups.find(begin * args->count);
    for (; begin < end; begin += kWords) {
      int size = static_cast<int>(end - begin < kWords ? end - begin : kWords);
      int64_t first = begin * args->count, last = first + size * args->count;
      last = last < args->size ? last : args->size;
      fetch_next(words + begin, kWords, end - begin);
      splitting.split(words + begin, size, digits);
      for_runs(args->groups, group, first, last,
               [&](int64_t group, int64_t from, int64_t to) HVD_INLINE {
                 float step = args->scale[group] * args->factor;
                 const Digit* mine = digits + (from - first);
                 for (int64_t i = 0; i < to - from; ++i) {
                   values[from + i] = as_value(mine[i], half, step);
                 }
               });
    }
  }
};

template <typename Digit, bool kStochastic>
void encode_all(const Lanes& args, const float* values, float* error, int64_t* words) {
  int64_t size = (args.size + args.count - 1) / args.count;
  torch::stable::parallel_for(0, size, kGrain, [&](int64_t begin, int64_t end) {
#ifdef HVD_V4
    if (isa_level() == 4) {
      return Isa<EncodeWords<Digit, kStochastic, true>>::v4(&args, values, error, words, begin,
                                                            end);
    }
#endif
    run_best<EncodeWords<Digit, kStochastic, false>>(&args, values, error, words, begin, end);
  });
}

template <bool kStochastic>
void encode_all(const Lanes& args, const float* values, float* error, int64_t* words) {
  if (args.width <= 8) {
    encode_all<uint8_t, kStochastic>(args, values, error, words);
  } else if (args.width <= 16) {
    encode_all<uint16_t, kStochastic>(args, values, error, words);
  } else {
    encode_all<uint64_t, kStochastic>(args, values, error, words);
  }
}

void lanes_encode_cpu(Tensor values, Tensor scale, Tensor edges, Tensor words,
                      Tensor quantization_error, int64_t bits, int64_t width, int64_t key) {
  Lanes args = checked(values, scale, edges, words, bits, width, key, 1.0);
  check_quantization_error(quantization_error, values);
  check_edges(args.groups, args.size);
  auto encode = key == -1 ? encode_all<false> : encode_all<true>;
  encode(args, const_data<float>(values), data<float>(quantization_error), data<int64_t>(words));
}

void lanes_decode_cpu(Tensor words, Tensor scale, Tensor edges, Tensor values, int64_t width,
                      double factor) {
  Lanes args = checked(values, scale, edges, words, 2, width, -1, factor);
  check_edges(args.groups, args.size);
  const int64_t* from = const_data<int64_t>(words);
  float* to = data<float>(values);
  torch::stable::parallel_for(0, words.numel(), kGrain, [&](int64_t begin, int64_t end) {
#ifdef HVD_V4
    if (isa_level() == 4 && args.width <= 16) {
      return Isa<DecodeWords<WideLanes>>::v4(&args, from, to, begin, end);
    }
#endif
    if (args.width <= 8) {
      run_best<DecodeWords<Splitter<uint8_t>>>(&args, from, to, begin, end);
    } else if (args.width <= 16) {
      run_best<DecodeWords<Splitter<uint16_t>>>(&args, from, to, begin, end);
    } else {
      run_best<DecodeWords<Splitter<uint32_t>>>(&args, from, to, begin, end);
    }
  });
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CPU, library) {
  library.impl("lanes_encode", TORCH_BOX(&hvd_compress::lanes_encode_cpu));
  library.impl("lanes_decode", TORCH_BOX(&hvd_compress::lanes_decode_cpu));
}
