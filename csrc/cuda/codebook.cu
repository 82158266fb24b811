// codebook_encode and codebook_decode on CUDA: one warp per tile of values, four adjacent values
// per lane, whose codes are packed in registers. The book is in shared memory.
#include "../codebook.h"
#include "codes.h"
#include "window.h"

namespace hvd_compress {
namespace {

constexpr int kBookSize = 512;  // levels in shared memory
constexpr int kHalves = kPerLane / kAdjacent;

// Not checked on the host.
__device__ __forceinline__ int64_t row_of(const Codebook& args, int64_t group) {
  int64_t kind = args.kind[group];
  return kind < 0 || kind >= args.kinds ? 0 : kind;
}

// The constants of one group. `first`: of its row in the book.
struct Decoding {
  float step;
  int first;

  __device__ Decoding() {}
  __device__ Decoding(const Codebook& args, int64_t group)
      : step(args.scale[group]), first(static_cast<int>(row_of(args, group)) << args.bits) {}

  __device__ Decoding from(int lane) const {
    Decoding other;
    other.step = __shfl_sync(kAll, step, lane);
    other.first = __shfl_sync(kAll, first, lane);
    return other;
  }
};

struct Encoding : Decoding {
  float inverse;

  __device__ Encoding() {}
  __device__ Encoding(const Codebook& args, int64_t group)
      : Decoding(args, group), inverse(1.0f / step) {}

  __device__ Encoding from(int lane) const {
    Encoding other;
    static_cast<Decoding&>(other) = Decoding::from(lane);
    other.inverse = __shfl_sync(kAll, inverse, lane);
    return other;
  }
};

// The codes of four adjacent values, of 4 * kBits bits. A lane has one such field in each half of a
// block; two lanes have the eight codes of a unit, which are whole bytes.
template <int kBits>
struct Fields {
  static constexpr bool kWhole = kBits % 2 == 0;  // a field is whole bytes
  static constexpr int kBytes = (kBits + 1) / 2;  // that a field touches
  using Word = std::conditional_t<kBits == 4, uint16_t, uint32_t>;
  static constexpr bool kHasWord = kBits == 4 || kBits == 8;  // as many bits as a field

  // Where this lane's field begins in the codes of a block.
  static __device__ __forceinline__ int place(int half) {
    return half * (kBlock / 16 * kBits) + lane_id() * kBits / 2;
  }
  static __device__ __forceinline__ bool aligned(const uint8_t* codes) {
    return kHasWord && reinterpret_cast<uintptr_t>(codes) % sizeof(Word) == 0;
  }

  // `inside`: whether the field has values. All lanes of the warp must call it.
  static __device__ __forceinline__ void store(uint8_t* block, int half, uint32_t field,
                                               bool inside) {
    uint64_t unit = field;
    if constexpr (!kWhole) {
      unit |= static_cast<uint64_t>(__shfl_xor_sync(kAll, field, 1)) << (4 * kBits);
      inside = inside && lane_id() % 2 == 0;  // its unit's first field has values if any has
    }
    if (!inside) return;
    uint8_t* to = block + place(half);
    if (aligned(block)) {
      *reinterpret_cast<Word*>(to) = static_cast<Word>(field);
      return;
    }
#pragma unroll
    for (int k = 0; k < (kWhole ? kBytes : kBits); ++k) to[k] = static_cast<uint8_t>(unit >> 8 * k);
  }

  // The bits above the field are undefined.
  static __device__ __forceinline__ uint32_t load(const uint8_t* block, int half) {
    const uint8_t* from = block + place(half);
    if (aligned(block)) return *reinterpret_cast<const Word*>(from);
    uint32_t field = 0;
#pragma unroll
    for (int k = 0; k < kBytes; ++k) field |= static_cast<uint32_t>(from[k]) << 8 * k;
    return kWhole ? field : field >> (lane_id() % 2 * 4);
  }
};

// This lane's fields of a block of which `inside` values exist; the others are 0.
template <int kBits>
__device__ __forceinline__ void load_fields(uint32_t (&to)[kHalves], const uint8_t* block,
                                            int inside) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    to[half] = 0;
    if (index_of(half * kAdjacent) < inside) to[half] = Fields<kBits>::load(block, half);
  }
}

// The values of a warp's tile that exist.
struct Tile {
  int64_t first;
  int size;

  __device__ explicit Tile(int64_t values) : first(warp_id() * kWarpTile) {
    int64_t left = values - first;
    size = static_cast<int>(max(int64_t{0}, min(left, int64_t{kWarpTile})));
  }
};

template <int kBits>
__global__ void __launch_bounds__(kThreads)
    encode_tiles(const __grid_constant__ Codebook args, const float* __restrict__ values,
                 float* __restrict__ error, uint8_t* __restrict__ codes) {
  constexpr int kLevels = 1 << kBits;
  HVD_SHARED(float, levels, kBookSize);
  // A search tree of the midpoints of each row. The root is node 1; after node i comes node 2 * i,
  // or 2 * i + 1 if the value is above. The last node is the code + 2**bits.
  HVD_SHARED(float, tree, kBookSize);
  Tile tile(args.size);
  bool aligned = on_16_bytes(values), aligned_error = on_16_bytes(error);
  float next[kPerLane];
  load(next, values + tile.first, tile.size, aligned);

  for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(args.kinds) << kBits;
       i += kThreads) {
    levels[i] = args.book[i];
    int node = i % kLevels;
    if (node == 0) continue;
    int depth = 31 - __clz(node);
    int place = ((2 * node + 1) << (kBits - 1 - depth)) - kLevels - 1;
    tree[i] = midpoint(args.book + (i - node), place);
  }
  __syncthreads();
  if (tile.size == 0) return;

  Window<Codebook, Encoding> window(args, tile.first);
#pragma unroll 1
  for (int at = 0; at < tile.size; at += kBlock) {
    float value[kPerLane];  // then its error
    memcpy(value, next, sizeof(value));
    int inside = tile.size - at;
    if (inside > kBlock) {
      load(next, values + tile.first + at + kBlock, inside - kBlock, aligned);
    }
    uint32_t fields[kHalves] = {};
    window.for_block(at, [&](int i, const Encoding& group) {
      float scaled = value[i] * group.inverse;
      int node = 1;
#pragma unroll
      for (int depth = 0; depth < kBits; ++depth) {
        node = 2 * node + (tree[group.first + node] < scaled);
      }
      int code = node - kLevels;
      value[i] = value[i] - levels[group.first + code] * group.step;
      if (index_of(i) >= inside) code = 0;  // padding
      fields[i / kAdjacent] |= static_cast<uint32_t>(code) << (i % kAdjacent * kBits);
    });
    store(error + tile.first + at, value, inside, aligned_error);
    uint8_t* block = codes + (tile.first + at) / 8 * kBits;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      bool has_values = index_of(half * kAdjacent) / 8 * 8 < inside;  // a unit is stored whole
      Fields<kBits>::store(block, half, fields[half], has_values);
    }
  }
}

template <int kBits>
__global__ void __launch_bounds__(kThreads)
    decode_tiles(const __grid_constant__ Codebook args, const uint8_t* __restrict__ codes,
                 float* __restrict__ values, bool add) {
  HVD_SHARED(float, levels, kBookSize);
  for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(args.kinds) << kBits;
       i += kThreads) {
    levels[i] = args.book[i];
  }
  Tile tile(args.size);
  bool aligned = on_16_bytes(values);
  const uint8_t* block = codes + tile.first / 8 * kBits;
  uint32_t next[kHalves];
  load_fields<kBits>(next, block, tile.size);
  __syncthreads();
  if (tile.size == 0) return;

  Window<Codebook, Decoding> window(args, tile.first);
#pragma unroll 1
  for (int at = 0; at < tile.size; at += kBlock) {
    float* to = values + tile.first + at;
    int inside = tile.size - at;
    uint32_t fields[kHalves];
    memcpy(fields, next, sizeof(fields));
    block += kBlock / 8 * kBits;
    load_fields<kBits>(next, block, inside - kBlock);
    float value[kPerLane], before[kPerLane];
    if (add) load(before, to, inside, aligned);
    window.for_block(at, [&](int i, const Decoding& group) {
      uint32_t code = fields[i / kAdjacent] >> (i % kAdjacent * kBits) & ((1u << kBits) - 1);
      value[i] = levels[group.first + code] * group.step;
      if (add) value[i] = before[i] + value[i];
    });
    store(to, value, inside, aligned);
  }
}

// The constants of one group, for a book that does not fit into shared memory.
struct Levels {
  const float* levels;
  float step;
  float inverse;
  int bits;

  __device__ Levels(const Codebook& args, int64_t group)
      : levels(args.levels(row_of(args, group))),
        step(args.scale[group]),
        inverse(1.0f / step),
        bits(args.bits) {}

  __device__ uint32_t encode(float value, float& error) const {
    int code = nearest(levels, bits, value * inverse);
    error = value - levels[code] * step;
    return static_cast<uint32_t>(code);
  }
  __device__ float decode(uint32_t code) const { return levels[code] * step; }
};

bool fits(const Codebook& args) { return args.kinds <= kBookSize >> args.bits; }

unsigned tiles_grid(const Codebook& args) { return ceil_div(args.size, kWarps * kWarpTile); }

// Calls f with the number of bits, kBits or fewer, as a constant.
template <int kBits = 8, typename F>
void with_bits(int bits, const F& f) {
  if (bits == kBits) return f(std::integral_constant<int, kBits>());
  if constexpr (kBits > 1) with_bits<kBits - 1>(bits, f);
}

void codebook_encode_cuda(Tensor values, Tensor scale, Tensor edges, Tensor book, Tensor kind,
                          Tensor codes, Tensor quantization_error, int64_t bits) {
  Codebook args = checked(values, scale, edges, book, kind, codes, bits);
  check_quantization_error(quantization_error, values);
  if (args.size == 0) return;
  if (!fits(args)) return encode_all<Levels>(args, values, codes, quantization_error);
  Launch launch(values);
  with_bits(args.bits, [&](auto constant) {
    launch.run(tiles_grid(args), encode_tiles<decltype(constant)::value>, args,
               const_data<float>(values), data<float>(quantization_error), data<uint8_t>(codes));
  });
}

void codebook_decode_cuda(Tensor codes, Tensor scale, Tensor edges, Tensor book, Tensor kind,
                          Tensor values, int64_t bits, bool add) {
  Codebook args = checked(values, scale, edges, book, kind, codes, bits);
  if (args.size == 0) return;
  if (!fits(args)) return decode_all<Levels>(args, codes, values, add);
  Launch launch(values);
  with_bits(args.bits, [&](auto constant) {
    launch.run(tiles_grid(args), decode_tiles<decltype(constant)::value>, args,
               const_data<uint8_t>(codes), data<float>(values), add);
  });
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, HVD_CUDA_KEY, library) {
  library.impl("codebook_encode", TORCH_BOX(&hvd_compress::codebook_encode_cuda));
  library.impl("codebook_decode", TORCH_BOX(&hvd_compress::codebook_decode_cuda));
}
