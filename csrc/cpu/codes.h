// Packing of codes on the CPU, one chunk at a time, so that its digits stay in the L1 cache.
//
// A Code has `groups`, `size`, `bits`, and for the values of one group
//   encode(group, values, error, digits, count)
//   decode(group, digits, values, count, add)
// Digits are the codes before packing, of 8 or 16 bits.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "../pack.h"
#include "groups.h"
#include "isa.h"
#include "wide.h"

namespace hvd_compress {

constexpr int kChunk = 512;  // values
constexpr int kUnits = kChunk / 8;
constexpr int64_t kGrain = 4096;  // units or words per thread, at least

// Units are read and written as whole words, which may exceed the last unit by this many bytes.
constexpr int kOver = 16;

// Packs and unpacks a chunk with code for any processor.
class Plain {
 public:
  HVD_BODY explicit Plain(int bits) : bits_(bits) {}

  template <typename Digit>
  HVD_BODY void pack(const Digit* digits, uint8_t* codes) const {
    if (bits_ == 8 * sizeof(Digit)) {  // no packing needed
      memcpy(codes, digits, kChunk * sizeof(Digit));
      return;
    }
    alignas(64) uint64_t low[kUnits], high[kUnits];
    for (int i = 0; i < kUnits; ++i) {
      Unit unit = pack_unit(digits + 8 * i, bits_);
      low[i] = unit.low;
      high[i] = unit.high;
    }
    for (int i = 0, bits = bits_; i < kUnits; ++i, codes += bits) {
      memcpy(codes, low + i, sizeof(uint64_t));
      memcpy(codes + sizeof(uint64_t), high + i, sizeof(uint64_t));
    }
  }

  template <typename Digit>
  HVD_BODY void unpack(const uint8_t* codes, int units, Digit* digits) const {
    if (bits_ == 8 * sizeof(Digit)) {
      memcpy(digits, codes, units * bits_);
      return;
    }
    uint8_t packed[kChunk * 2 + kOver] = {};
    memcpy(packed, codes, units * bits_);
    for (int i = 0; i < kUnits; ++i) {
      const uint8_t* unit = packed + i * bits_;
      unpack_unit({load_word(unit), load_word(unit + sizeof(uint64_t))}, bits_, digits + 8 * i);
    }
  }

 private:
  int bits_;
};

#ifdef HVD_V4
class Wide {
 public:
  explicit Wide(int bits) : bits_(bits), fields_(bits, [=](int i) { return i * bits; }) {}

  HVD_V4 void pack(const uint8_t* digits, uint8_t* codes) const {
    int bits = bits_;
    if (bits == 8) {  // no packing needed
      memcpy(codes, digits, kChunk);
      return;
    }
    uint64_t mask = digit_mask<uint8_t>(bits);
#pragma GCC unroll 8
    for (int i = 0; i < kUnits; ++i, codes += bits) {
      uint64_t unit = fold_wide(digits + 8 * i, mask);
      memcpy(codes, &unit, sizeof(unit));
    }
  }

  HVD_V4 void pack(const uint16_t* digits, uint8_t* codes) const {
    int bits = bits_;
    uint64_t mask = digit_mask<uint16_t>(bits);
#pragma GCC unroll 8
    for (int i = 0; i < kUnits; ++i, digits += 8, codes += bits) {
      Unit unit = join(fold_wide(digits, mask), fold_wide(digits + 4, mask), bits);
      memcpy(codes, &unit, sizeof(unit));
    }
  }

  template <typename Digit>
  HVD_V4 void unpack(const uint8_t* codes, int units, Digit* digits) const {
    FieldReader read(fields_);
    int size = units * bits_;
    for (int place = 0; place < size; place += 2 * bits_, digits += 16) {
      int bytes = size - place < 2 * bits_ ? size - place : 2 * bits_;
      __mmask64 inside = (__mmask64{1} << bytes) - 1;
      store_digits(digits, read(_mm512_maskz_loadu_epi8(inside, codes + place)), 16);
    }
  }

 private:
  int bits_;
  Fields fields_;
};
#endif

// Prefetches the chunk after this one of `size` entries; `left` entries remain. The hardware
// prefetcher does not follow short passes over several streams. Only for memory that is read.
template <typename T>
HVD_BODY void fetch_next(const T* chunk, int64_t size, int64_t left) {
  constexpr int64_t kLine = 64 / sizeof(T);
  int64_t end = left < 2 * size ? left : 2 * size;
  for (int64_t i = size; i < end; i += kLine) __builtin_prefetch(chunk + i);
}

// Encode and Decode process the units `begin` to `end`. Decode's `values` begin with those of
// `begin`.

template <typename Code, typename Digit, typename Packing>
struct Encode {
  static HVD_BODY void run(const Code* code, const float* values, float* error, uint8_t* codes,
                           int64_t begin, int64_t end) {
    alignas(64) Digit digits[kChunk] = {};
    uint8_t packed[kChunk * 2 + kOver];
    float ignored[kChunk];
    Packing packing(code->bits);
    int64_t group = code->groups.find(begin * 8);
    for (; begin < end; begin += kUnits) {
      int units = static_cast<int>(end - begin < kUnits ? end - begin : kUnits);
      int64_t first = begin * 8, last = first + units * 8;
      for (; last > code->size; --last) digits[last - 1 - first] = 0;
      fetch_next(values + first, kChunk, code->size - first);
      for_runs(code->groups, group, first, last,
               [&](int64_t group, int64_t from, int64_t to) HVD_INLINE {
                 code->encode(group, values + from, error ? error + from : ignored,
                              digits + (from - first), static_cast<int>(to - from));
               });
      uint8_t* to = codes + begin * code->bits;
      if ((end - begin - kUnits) * code->bits >= kOver) {
        packing.pack(digits, to);
      } else {  // do not write beyond the part of this thread
        packing.pack(digits, packed);
        memcpy(to, packed, units * code->bits);
      }
    }
  }
};

template <typename Code, typename Digit, typename Packing>
struct Decode {
  static HVD_BODY void run(const Code* code, const uint8_t* codes, float* values, bool add,
                           int64_t begin, int64_t end) {
    alignas(64) Digit digits[kChunk];
    Packing packing(code->bits);
    int64_t group = code->groups.find(begin * 8), start = begin * 8;
    for (; begin < end; begin += kUnits) {
      int units = static_cast<int>(end - begin < kUnits ? end - begin : kUnits);
      int64_t first = begin * 8, last = first + units * 8;
      last = last < code->size ? last : code->size;
      const uint8_t* packed = codes + begin * code->bits;
      fetch_next(packed, kUnits * code->bits, (end - begin) * code->bits);
      packing.unpack(packed, units, digits);
      for_runs(code->groups, group, first, last,
               [&](int64_t group, int64_t from, int64_t to) HVD_INLINE {
                 code->decode(group, digits + (from - first), values + (from - start),
                              static_cast<int>(to - from), add);
               });
    }
  }
};

// All units in parallel, with no error if that is null. plain: with any instruction set. narrow:
// with AVX2 intrinsics and the Code's Packing. wide: with AVX-512 intrinsics.

template <typename Digit, typename Code>
void encode_plain(const Code& code, const float* values, float* error, uint8_t* codes) {
  torch::stable::parallel_for(0, (code.size + 7) / 8, kGrain, [&](int64_t begin, int64_t end) {
    run_best<Encode<Code, Digit, Plain>>(&code, values, error, codes, begin, end);
  });
}

template <typename Digit, typename Code>
void decode_plain(const Code& code, const uint8_t* codes, float* values, bool add) {
  torch::stable::parallel_for(0, (code.size + 7) / 8, kGrain, [&](int64_t begin, int64_t end) {
    run_best<Decode<Code, Digit, Plain>>(&code, codes, values + begin * 8, add, begin, end);
  });
}

#ifdef HVD_V4
template <typename Code>
void encode_narrow(const Code& code, const float* values, float* error, uint8_t* codes) {
  torch::stable::parallel_for(0, (code.size + 7) / 8, kGrain, [&](int64_t begin, int64_t end) {
    Isa<Encode<Code, uint8_t, typename Code::Packing>>::v3(&code, values, error, codes, begin, end);
  });
}

template <typename Digit, typename Code>
void encode_wide(const Code& code, const float* values, float* error, uint8_t* codes) {
  torch::stable::parallel_for(0, (code.size + 7) / 8, kGrain, [&](int64_t begin, int64_t end) {
    Isa<Encode<Code, Digit, Wide>>::v4(&code, values, error, codes, begin, end);
  });
}

template <typename Code>
void decode_wide(const Code& code, const uint8_t* codes, float* values, bool add) {
  torch::stable::parallel_for(0, (code.size + 7) / 8, kGrain, [&](int64_t begin, int64_t end) {
    Isa<Decode<Code, uint16_t, Wide>>::v4(&code, codes, values + begin * 8, add, begin, end);
  });
}
#endif

}  // namespace hvd_compress
