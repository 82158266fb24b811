// codebook_encode and codebook_decode on CUDA: one warp per tile of values, four adjacent values
// per lane, whose codes are packed in registers. The book is in shared memory.
#include "codebook.h"

namespace hvd_compress {
namespace {

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

template <int kBits>
__global__ void __launch_bounds__(kThreads, kResident)
    encode_tiles(const __grid_constant__ Codebook args, const float* values, float* error,
                 uint8_t* __restrict__ codes) {
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
    if (error) store(error + tile.first + at, value, inside, aligned_error);
    uint8_t* block = codes + (tile.first + at) / 8 * kBits;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      bool has_values = index_of(half * kAdjacent) / 8 * 8 < inside;  // a unit is stored whole
      Fields<kBits>::store(block, half, fields[half], has_values);
    }
  }
}

template <int kBits>
__global__ void __launch_bounds__(kThreads, kResident)
    decode_tiles(const __grid_constant__ Codebook args, const uint8_t* __restrict__ codes,
                 float* __restrict__ values, bool add) {
  HVD_SHARED(float, memory, kBookSize);
  const float* levels = levels_of(args, memory);
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
    decode_block<kBits>(value, fields, levels, window, at);
#pragma unroll
    for (int i = 0; add && i < kPerLane; ++i) value[i] = before[i] + value[i];
    store(to, value, inside, aligned);
  }
}

void codebook_encode_cuda(Tensor values, Tensor scale, Tensor edges, Tensor book, Tensor kind,
                          Tensor codes, std::optional<Tensor> quantization_error, int64_t bits) {
  Codebook args = checked(values, scale, edges, book, kind, codes, bits);
  check_error(quantization_error, values);
  if (args.size == 0) return;
  if (!fits(args)) return encode_all<Levels>(args, values, codes, data_or_null(quantization_error));
  Launch launch(values);
  with_bits(args.bits, [&](auto constant) {
    launch.run(tiles_grid(args), encode_tiles<decltype(constant)::value>, args,
               const_data<float>(values), data_or_null(quantization_error), data<uint8_t>(codes));
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
