// accumulate on CUDA: one warp per tile of the bucket, then the moments, of a residual that a
// bucket's size leaves in the L2 cache.
#include "../accumulate.h"
#include "codebook.h"
#include "moments.h"
#include "pieces.h"

namespace hvd_compress {
namespace {

// The sum of squares of a block, in lane 0. Running sum k is that of the entries 32 apart from k
// on.
__device__ __forceinline__ double square_of(const float (&steps)[kPerLane]) {
  constexpr int kTogether = kSums / kAdjacent;  // lanes that have 32 adjacent entries
  Sums sums[kAdjacent]{};
#pragma unroll
  for (int part = 0; part < kPerLane; part += kAdjacent) {
#pragma unroll
    for (int lane = 0; lane < kLanes; lane += kTogether) {
#pragma unroll
      for (int k = 0; k < kAdjacent; ++k) {
        float step = __shfl_sync(kAll, steps[part + k], lane + lane_id() % kTogether);
        sums[k].square += static_cast<double>(step) * static_cast<double>(step);
      }
    }
  }
  return joined(sums).square;
}

template <typename T>
__device__ __forceinline__ void add_block(const Accumulate& args, const PieceTensor& tensor,
                                          int64_t block, int64_t bucket_block,
                                          float (&residual)[kPerLane]) {
  const T* grad = static_cast<const T*>(tensor.data);
  const float* start = static_cast<const float*>(tensor.weight);
  int64_t entry = block * kBlock;
  int inside = tensor.inside(block);
  T grads[kPerLane];  // 0 in the padding
  float steps[kPerLane];
  load(grads, grad + entry, inside, on_16_bytes(grad));
  if (start) load(steps, start + entry, inside, on_16_bytes(start));
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    float value = static_cast<float>(grads[i]);
    steps[i] = start ? value - steps[i] : value;
  }
  if (args.squares) {
    double square = square_of(steps);
    if (lane_id() == 0) args.squares[bucket_block] = square;
  }
  bool bad = false;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    Entry found = accumulate<false>(steps[i] * args.scale, residual[i], 0.0f, 0.0f);
    residual[i] = found.residual;
    bad |= !found.usable;
  }
  if (__any_sync(kAll, bad) && lane_id() == 0) atomicOr(args.invalid, 1);
}

// What was sent, in codes of kBits bits, for the blocks of a tile.
template <int kBits>
struct Sent {
  const uint8_t* codes;
  const float* levels;
  Window<Codebook, Decoding> window;

  __device__ Sent(const Accumulate& args, float* shared, int64_t first)
      : codes(args.codes), levels(levels_of(args.sent, shared)), window(args.sent, first) {
    __syncthreads();
  }

  __device__ __forceinline__ void subtract(float (&residual)[kPerLane], int64_t block, int at) {
    uint32_t fields[kHalves];
    load_fields<kBits>(fields, codes + block * (kBlock / 8) * kBits, kBlock);
    float sent[kPerLane];
    decode_block<kBits>(sent, fields, levels, window, at);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) residual[i] = residual[i] - sent[i];
  }
};

// Nothing was sent.
template <>
struct Sent<0> {
  __device__ Sent(const Accumulate&, float*, int64_t) {}
  __device__ __forceinline__ void subtract(float (&)[kPerLane], int64_t, int) {}
};

template <int kBits>
__global__ void __launch_bounds__(kThreads, kResident)
    accumulate_tiles(const __grid_constant__ Accumulate args,
                     const __grid_constant__ TensorBlocks tensors) {
  HVD_SHARED(float, memory, kBookSize);
  Tile tile(args.moments.size);
  Sent<kBits> sent(args, memory, min(tile.first, args.moments.size - 1));
  if (tile.size == 0) return;
  bool aligned = on_16_bytes(args.residual);
#pragma unroll 1
  for (int at = 0; at < tile.size; at += kBlock) {
    int64_t block = (tile.first + at) / kBlock;
    float residual[kPerLane];
    load(residual, args.residual + tile.first + at, kBlock, aligned);
    sent.subtract(residual, block, at);
    int64_t number = find_row(args.pieces, tensors.count, block);
    if (number >= 0) {  // the table was not checked on the host
      Piece piece = args.pieces[number];
      PieceTensor tensor = tensors.rows[number];
      bool fit = fits(piece, args.blocks, kMaxSlots);
      int64_t local = fit ? block - piece.first_block : 0;
      if (fit && local < tensor.blocks) {
        if (tensor.dtype == ScalarType::Float) {
          add_block<float>(args, tensor, local, block, residual);
        } else if (tensor.dtype == ScalarType::Half) {
          add_block<Half>(args, tensor, local, block, residual);
        } else {
          add_block<BFloat16>(args, tensor, local, block, residual);
        }
      }
    }
    store(args.residual + tile.first + at, residual, kBlock, aligned);
  }
}

void accumulate_cuda(std::vector<Tensor> grads, std::vector<Tensor> starts, Tensor residual,
                     Tensor pieces, Tensor edges, Tensor moments, std::optional<Tensor> squares,
                     Tensor invalid, double scale, std::optional<Tensor> codes,
                     std::optional<Tensor> sent_scale, std::optional<Tensor> book,
                     std::optional<Tensor> kind, int64_t bits) {
  PieceTensors tensors = checked_tensors(grads, "grads", pieces);
  Accumulate args = checked(tensors, starts, residual, pieces, edges, moments, squares, invalid,
                            scale, codes, sent_scale, book, kind, bits);
  if (args.blocks == 0) return;
  Launch launch(residual);
  DeviceRows rows(tensors.rows, residual);
  TensorBlocks blocks{rows.data(), pieces.size(0), tensors.blocks};
  unsigned grid = ceil_div(args.moments.size, kWarps * kWarpTile);
  if (args.codes) {
    with_bits(args.sent.bits, [&](auto constant) {
      launch.run(grid, accumulate_tiles<decltype(constant)::value>, args, blocks);
    });
  } else {
    launch.run(grid, accumulate_tiles<0>, args, blocks);
  }
  store_moments(launch, residual, args.moments);
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, HVD_CUDA_KEY, library) {
  library.impl("accumulate", TORCH_BOX(&hvd_compress::accumulate_cuda));
}
