// Codes of a codebook on CUDA: the constants of a group, and a warp's fields of codes.
#pragma once

#include "../codebook.h"
#include "codes.h"
#include "window.h"

namespace hvd_compress {

constexpr int kBookSize = 512;  // levels in shared memory
constexpr int kHalves = kPerLane / kAdjacent;

// Whether the book fits into shared memory.
HVD_BODY bool fits(const Codebook& args) { return args.kinds <= kBookSize >> args.bits; }

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

// The levels, in shared memory if they fit there: the thread block must wait for them.
__device__ __forceinline__ const float* levels_of(const Codebook& args, float* shared) {
  if (!fits(args)) return args.book;
  for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(args.kinds) << args.bits;
       i += kThreads) {
    shared[i] = args.book[i];
  }
  return shared;
}

// The values of this lane in the block that begins `at` values after the tile's first.
template <int kBits>
__device__ __forceinline__ void decode_block(float (&to)[kPerLane],
                                             const uint32_t (&fields)[kHalves], const float* levels,
                                             Window<Codebook, Decoding>& window, int at) {
  window.for_block(at, [&](int i, const Decoding& group) {
    uint32_t code = fields[i / kAdjacent] >> (i % kAdjacent * kBits) & ((1u << kBits) - 1);
    to[i] = levels[group.first + code] * group.step;
  });
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

inline unsigned tiles_grid(const Codebook& args) { return ceil_div(args.size, kWarps * kWarpTile); }

// Calls f with the number of bits, kBits or fewer, as a constant.
template <int kBits = 8, typename F>
void with_bits(int bits, const F& f) {
  if (bits == kBits) return f(std::integral_constant<int, kBits>());
  if constexpr (kBits > 1) with_bits<kBits - 1>(bits, f);
}

}  // namespace hvd_compress
