// Codes of a codebook on the CPU: tables of its rows, encoders and decoders for each instruction
// set.
#pragma once

#include "../codebook.h"
#include "cells.h"
#include "permute.h"

namespace hvd_compress {

constexpr int kMostLevels = 256;

// A row of the book. With up to 4 bits, `tree` is a binary search tree of its midpoints: the root
// is node 1; after node i comes node 2 * i, or 2 * i + 1 if the value is above. The last node is
// the code + 2**bits.
struct Row {
  alignas(64) float tree[1 << kNarrowBits] = {};
  alignas(64) float levels[kMostLevels] = {};

  Row(const float* book, int bits) {
    std::copy_n(book, 1 << bits, levels);
    for (int depth = 0; bits <= kNarrowBits && depth < bits; ++depth) {
      int apart = 1 << (bits - depth);
      for (int i = 0; i < 1 << depth; ++i) {
        tree[(1 << depth) + i] = midpoint(book, i * apart + apart / 2 - 1);
      }
    }
  }
};

struct Rows : Codebook {
  const Row* rows;
  const Cells* cells;  // of each row, for encoding with more than 4 bits

  HVD_BODY const Row& row(int64_t group) const { return rows[kind[group]]; }
};

struct PlainCode : Rows {
  HVD_BODY void encode(int64_t group, const float* values, float* error, uint8_t* __restrict digits,
                       int count) const {
    const Row& mine = row(group);
    float step = scale[group], inverse = 1.0f / step;
    uint32_t found[kChunk];
    switch (bits) {
      case 1:
        compare_all<1>(mine.levels, values, inverse, found, count);
        break;
      case 2:
        compare_all<3>(mine.levels, values, inverse, found, count);
        break;
      case 3:
        compare_all<7>(mine.levels, values, inverse, found, count);
        break;
      case 4:
        compare_all<15>(mine.levels, values, inverse, found, count);
        break;
      default:
        for (int i = 0; i < count; ++i) found[i] = cells[kind[group]].code(values[i] * inverse);
    }
    for (int i = 0; i < count; ++i) digits[i] = static_cast<uint8_t>(found[i]);
    float levels[kChunk];
    look_up(mine.levels, digits, levels, count);
    for (int i = 0; i < count; ++i) error[i] = values[i] - levels[i] * step;
  }

  HVD_BODY void decode(int64_t group, const uint8_t* __restrict digits, float* __restrict values,
                       int count, bool add) const {
    float step = scale[group], levels[kChunk];
    look_up(row(group).levels, digits, levels, count);
    for (int i = 0; i < count; ++i) {
      float value = levels[i] * step;
      values[i] = add ? values[i] + value : value;
    }
  }

 private:
  // Eight at a time: GCC's vectorised loop over single digits is slower.
  static HVD_BODY void look_up(const float* levels, const uint8_t* digits, float* __restrict to,
                               int count) {
    int i = 0;
    for (; i + 8 <= count; i += 8) {
      uint64_t word = load_word(digits + i);
      for (int k = 0; k < 8; ++k) to[i + k] = levels[static_cast<uint8_t>(word >> (8 * k))];
    }
    for (; i < count; ++i) to[i] = levels[digits[i]];
  }

  // For few midpoints: compares with all of them, which is vectorised.
  template <int kMidpoints>
  static HVD_BODY void compare_all(const float* levels, const float* __restrict values,
                                   float inverse, uint32_t* __restrict found, int count) {
    float middles[kMidpoints];
    for (int k = 0; k < kMidpoints; ++k) middles[k] = midpoint(levels, k);
    for (int i = 0; i < count; ++i) {
      float scaled = values[i] * inverse;
      uint32_t below = 0;
      for (int k = 0; k < kMidpoints; ++k) below += middles[k] < scaled;
      found[i] = below;
    }
  }
};

#ifdef HVD_V4
// Not inlined: the callers are compiled for every instruction set. For codes of up to 4 bits, by
// AVX2:
template <int kBits>
struct NarrowCode : Rows {
  using Packing = Narrow<kBits, kChunk>;

  HVD_V3 void encode(int64_t group, const float* values, float* error, uint8_t* digits,
                     int count) const {
    const Row& mine = row(group);
    narrow_encode<kBits>(mine.tree, mine.levels, scale[group], values, error, digits, count);
  }

  HVD_V3 void decode(int64_t group, const uint32_t* digits, float* values, int count,
                     bool add) const {
    narrow_decode<kBits>(row(group).levels, scale[group], digits, values, count, add);
  }
};

// For more bits:
struct CellCode : Rows {
  HVD_V3 void encode(int64_t group, const float* values, float* error, uint8_t* digits,
                     int count) const {
    cells_encode(cells[kind[group]], row(group).levels, scale[group], values, error, digits, count);
  }

  HVD_V3 void decode(int64_t group, const uint8_t* digits, float* values, int count,
                     bool add) const {
    levels_decode(row(group).levels, scale[group], digits, values, count, add);
  }
};

// Levels and midpoints in registers of AVX-512:
template <int kBits>
struct PermuteCode : Rows {
  HVD_V4 void encode(int64_t group, const float* values, float* error, uint8_t* digits,
                     int count) const {
    const Row& mine = row(group);
    permute_encode<kBits>(mine.tree, mine.levels, scale[group], values, error, digits, count);
  }

  HVD_V4 void decode(int64_t group, const uint16_t* digits, float* values, int count,
                     bool add) const {
    permute_decode<kBits>(row(group).levels, scale[group], digits, values, count, add);
  }
};
#endif

inline std::vector<Row> checked_rows(const Codebook& args, int64_t ranks = 1) {
  check_edges(args.groups, args.size);
  for (int64_t group = 0; group < ranks * args.groups.count; ++group) {
    check_range("every kind", 0, args.kind[group], args.kinds - 1);
  }
  std::vector<Row> rows;
  for (int64_t i = 0; i < args.kinds; ++i) {
    const float* levels = args.levels(i);
    for (int k = 1; k < 1 << args.bits; ++k) {
      STD_TORCH_CHECK(levels[k - 1] <= levels[k], "every row of book must ascend, got ", levels[k],
                      " after ", levels[k - 1], " in row ", i);
    }
    rows.emplace_back(levels, args.bits);
  }
  return rows;
}

// Calls f with the number of bits, kBits or fewer, as a constant.
template <int kBits, typename F>
void with_bits(int bits, const F& f) {
  if (bits == kBits) return f(std::integral_constant<int, kBits>());
  if constexpr (kBits > 1) with_bits<kBits - 1>(bits, f);
}

// Decodes the units `begin` to `end` of codes to `values`, which begin with those of `begin`.
using DecodeUnits = void (*)(const Rows* rows, const uint8_t* codes, float* values, bool add,
                             int64_t begin, int64_t end);

// The fastest on this processor for codes of so many bits.
inline DecodeUnits decoder(int bits) {
  [[maybe_unused]] DecodeUnits best = nullptr;
#ifdef HVD_V4
  if (isa_level() == 4 && bits < 8) {
    with_bits<7>(bits, [&](auto constant) {
      best = [](const Rows* rows, const uint8_t* codes, float* values, bool add, int64_t begin,
                int64_t end) {
        using Code = PermuteCode<decltype(constant)::value>;
        Code code{*rows};
        Isa<Decode<Code, uint16_t, Wide>>::v4(&code, codes, values, add, begin, end);
      };
    });
    return best;
  }
  if (isa_level() == 3 && bits <= kNarrowBits) {
    with_bits<kNarrowBits>(bits, [&](auto constant) {
      best = [](const Rows* rows, const uint8_t* codes, float* values, bool add, int64_t begin,
                int64_t end) {
        using Code = NarrowCode<decltype(constant)::value>;
        Code code{*rows};
        Isa<Decode<Code, uint32_t, typename Code::Packing>>::v3(&code, codes, values, add, begin,
                                                                end);
      };
    });
    return best;
  }
  if (isa_level() >= 3) {
    return [](const Rows* rows, const uint8_t* codes, float* values, bool add, int64_t begin,
              int64_t end) {
      CellCode code{*rows};
      run_best<Decode<CellCode, uint8_t, Plain>>(&code, codes, values, add, begin, end);
    };
  }
#endif
  return [](const Rows* rows, const uint8_t* codes, float* values, bool add, int64_t begin,
            int64_t end) {
    PlainCode code{*rows};
    run_best<Decode<PlainCode, uint8_t, Plain>>(&code, codes, values, add, begin, end);
  };
}

}  // namespace hvd_compress
