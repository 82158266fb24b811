// codebook_encode and codebook_decode on the CPU.
#include "../codebook.h"

#include "../codebook_rim.h"
#include "codes.h"
#include "permute.h"

namespace hvd_compress {
namespace {

constexpr int kMostLevels = 256;

// A row of the book, ready to be searched: midpoint `node` of `tree` is compared, and then the one
// at 2 * node or, if the value is above, at 2 * node + 1; the first is at 1.
struct Row {
  alignas(64) float tree[kMostLevels] = {};
  alignas(64) float levels[kMostLevels] = {};

  Row(const float* book, int bits) {
    std::copy_n(book, 1 << bits, levels);
    for (int depth = 0; depth < bits; ++depth) {
      int apart = 1 << (bits - depth);
      for (int i = 0; i < 1 << depth; ++i) {
        tree[(1 << depth) + i] = midpoint(book, i * apart + apart / 2 - 1);
      }
    }
  }
};

struct Rows : Codebook {
  const Row* rows;

  HVD_BODY const Row& row(int64_t group) const { return rows[kind[group]]; }
};

struct PlainCode : Rows {
  template <typename Digit>
  HVD_BODY void encode(int64_t group, const float* __restrict values, float* __restrict lost,
                       Digit* __restrict digits, int count) const {
    const Row& mine = row(group);
    float step = scale[group], inverse = 1.0f / step;
    uint32_t nodes[kChunk];
    for (int i = 0; i < count; ++i) nodes[i] = 1;
    for (int depth = 0; depth < bits; ++depth) {
      for (int i = 0; i < count; ++i) {
        nodes[i] = 2 * nodes[i] + (mine.tree[nodes[i]] < values[i] * inverse);
      }
    }
    for (int i = 0; i < count; ++i) {
      uint32_t code = nodes[i] - (1u << bits);
      digits[i] = static_cast<Digit>(code);
      lost[i] = values[i] - mine.levels[code] * step;
    }
  }

  HVD_BODY void decode(int64_t group, const uint16_t* __restrict digits, float* __restrict values,
                       int count, bool add) const {
    const Row& mine = row(group);
    float step = scale[group];
    for (int i = 0; i < count; ++i) {
      float value = mine.levels[digits[i]] * step;
      values[i] = add ? values[i] + value : value;
    }
  }
};

#ifdef HVD_V4
// Levels and midpoints from registers. Calls, not inlined: the drivers belong to no level.
template <int kBits>
struct PermuteCode : Rows {
  template <typename Digit>
  HVD_V4 void encode(int64_t group, const float* values, float* lost, Digit* digits,
                     int count) const {
    const Row& mine = row(group);
    permute_encode<kBits>(mine.tree, mine.levels, scale[group], values, lost, digits, count);
  }

  HVD_V4 void decode(int64_t group, const uint16_t* digits, float* values, int count, bool add) const {
    permute_decode<kBits>(row(group).levels, scale[group], digits, values, count, add);
  }
};
#endif

// Calls f with the Code of these arguments that is best here.
template <typename F>
void with_code(const Codebook& args, const F& f) {
  check_edges(args.groups, args.size);
  for (int64_t group = 0; group < args.groups.count; ++group) {
    check_range("every kind", 0, args.kind[group], args.kinds - 1);
  }
  std::vector<Row> rows;
  for (int64_t i = 0; i < args.kinds; ++i) {
    const float* levels = args.levels(i);
    for (int k = 1; k < 1 << args.bits; ++k) {
      STD_TORCH_CHECK(levels[k - 1] <= levels[k], "every row of book has to ascend, got ",
                      levels[k], " after ", levels[k - 1], " in row ", i);
    }
    rows.emplace_back(levels, args.bits);
  }
#ifdef HVD_V4
  if (isa_level() == 4) {
    switch (args.bits) {
      case 1: return f(PermuteCode<1>{{args, rows.data()}});
      case 2: return f(PermuteCode<2>{{args, rows.data()}});
      case 3: return f(PermuteCode<3>{{args, rows.data()}});
      case 4: return f(PermuteCode<4>{{args, rows.data()}});
      case 5: return f(PermuteCode<5>{{args, rows.data()}});
      case 6: return f(PermuteCode<6>{{args, rows.data()}});
      case 7: return f(PermuteCode<7>{{args, rows.data()}});
      case 8: return f(PermuteCode<8>{{args, rows.data()}});
    }
  }
#endif
  f(PlainCode{{args, rows.data()}});
}

void codebook_encode_cpu(Tensor values, Tensor scale, Tensor edges, Tensor book, Tensor kind,
                         Tensor codes, Tensor lost, int64_t bits) {
  check_lost(lost, values);
  with_code(checked(values, scale, edges, book, kind, codes, bits), [&](auto code) {
    encode_all(code, const_data<float>(values), data<float>(lost), data<uint8_t>(codes));
  });
}

void codebook_decode_cpu(Tensor codes, Tensor scale, Tensor edges, Tensor book, Tensor kind,
                         Tensor values, int64_t bits, bool add) {
  with_code(checked(values, scale, edges, book, kind, codes, bits), [&](auto code) {
    decode_all(code, const_data<uint8_t>(codes), data<float>(values), add);
  });
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CPU, library) {
  library.impl("codebook_encode", TORCH_BOX(&hvd_compress::codebook_encode_cpu));
  library.impl("codebook_decode", TORCH_BOX(&hvd_compress::codebook_decode_cpu));
}
