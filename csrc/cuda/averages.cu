// codebook_mean, codebook_moments and codebook_move on CUDA.
#include "../averages.h"
#include "codebook.h"
#include "moments.h"

namespace hvd_compress {
namespace {

// Value `i` of codes, which is in `group`.
__device__ __forceinline__ float decoded(const Codebook& args, const uint8_t* codes, int64_t i,
                                         int64_t group) {
  return args.levels(row_of(args, group))[code_at(codes, i, args.bits)] * args.scale[group];
}

__global__ void __launch_bounds__(kThreads) mean_kernel(const __grid_constant__ Mean args) {
  const Groups& groups = args.codebook.groups;
  int64_t size = args.codebook.size, first = static_cast<int64_t>(blockIdx.x) * kTile;
  int64_t end = min(first + kTile, size), group = groups.find(first + threadIdx.x);
  for (int64_t i = first + threadIdx.x; i < end; i += kThreads) {
    if (i >= groups.edges[group + 1]) group = groups.find(i);
    float sum = 0.0f;
    for (int64_t sender = 0; sender < args.ranks; ++sender) {
      float value = sender == args.rank
                        ? args.values[i]
                        : decoded(args.of(sender), args.codes + sender * args.stride, i, group);
      sum = sender > 0 ? sum + value : value;
    }
    args.mean[i] = sum * args.factor;
  }
}

void codebook_mean_cuda(Tensor rows, Tensor values, Tensor scale, Tensor edges, Tensor book,
                        Tensor kind, Tensor mean, Tensor moments, int64_t rank, int64_t skip,
                        int64_t bits) {
  Mean args = checked(rows, values, scale, edges, book, kind, mean, moments, rank, skip, bits);
  if (args.codebook.groups.count == 0) return;
  Launch launch(values);
  if (args.codebook.size > 0) launch.run(ceil_div(args.codebook.size, kTile), mean_kernel, args);
  store_moments(launch, mean, args.moments);
}

// One warp per part of decoded values.
__global__ void __launch_bounds__(kThreads)
    decoded_parts(const __grid_constant__ Codebook args, const uint8_t* __restrict__ codes,
                  Sums* __restrict__ parts) {
  int64_t first = warp_id() * kPart, end = min(first + kPart, args.size);
  if (first >= args.size) return;
  Sums sums[1]{};
  int64_t group = args.groups.find(first + lane_id());
  for (int64_t i = first + lane_id(); i < end; i += kLanes) {
    if (i >= args.groups.edges[group + 1]) group = args.groups.find(i);
    add_moments(decoded(args, codes, i, group), sums[0].square, sums[0].fourth, sums[0].largest);
  }
  Sums all = joined(sums);
  if (lane_id() == 0) parts[warp_id()] = all;
}

// The moments of all parts, by one warp.
__global__ void __launch_bounds__(kThreads)
    sum_parts(const __grid_constant__ Moments args, const Sums* __restrict__ parts, int64_t count) {
  if (warp_id() > 0) return;
  Sums sums[1]{};
  for (int64_t i = lane_id(); i < count; i += kLanes) {
    sums[0].square += parts[i].square;
    sums[0].fourth += parts[i].fourth;
    sums[0].largest = larger(parts[i].largest, sums[0].largest);
  }
  Sums all = joined(sums);
  if (lane_id() == 0) args.store(0, all);
}

void codebook_moments_cuda(Tensor codes, Tensor scale, Tensor edges, Tensor book, Tensor kind,
                           Tensor out, int64_t count, int64_t bits) {
  Codebook args = checked_moments(codes, scale, edges, book, kind, out, count, bits);
  int64_t parts = (count + kPart - 1) / kPart;
  Launch launch(codes);
  Tensor sums = torch::stable::new_empty(codes, {parts * static_cast<int64_t>(sizeof(Sums))},
                                         ScalarType::Byte);
  if (parts > 0) {
    launch.run(grid_for(parts), decoded_parts, args, const_data<uint8_t>(codes), data<Sums>(sums));
  }
  launch.run(1, sum_parts, Moments{nullptr, data<double>(out), {}, 0}, const_data<Sums>(sums),
             parts);
}

template <int kBits>
__global__ void __launch_bounds__(kThreads, kResident)
    move_tiles(const __grid_constant__ Move args, const uint8_t* __restrict__ codes) {
  HVD_SHARED(float, memory, kBookSize);
  const float* levels = levels_of(args.codebook, memory);
  __syncthreads();
  Tile tile(args.codebook.size);
  if (tile.size == 0) return;
  bool aligned = on_16_bytes(args.common) && on_16_bytes(args.velocity);
  float factor = args.factor_or_one();
  Window<Codebook, Decoding> window(args.codebook, tile.first);
#pragma unroll 1
  for (int at = 0; at < tile.size; at += kBlock) {
    int64_t first = tile.first + at;
    int inside = tile.size - at;
    uint32_t fields[kHalves];
    load_fields<kBits>(fields, codes + first / 8 * kBits, inside);
    float average[kPerLane], common[kPerLane], velocity[kPerLane] = {}, before[kPerLane];
    float own[kPerLane];
    load(common, args.common + first, inside, aligned);
    if (args.velocity) load(velocity, args.velocity + first, inside, aligned);
    if (args.before) {
      load(before, args.before + first, inside, on_16_bytes(args.before));
      load(own, args.own + first, inside, on_16_bytes(args.own));
    }
    decode_block<kBits>(average, fields, levels, window, at);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      float now = moved(args, average[i] * factor, common[i], velocity[i]);
      if (args.before) now = (own[i] - before[i]) + now;
      own[i] = now;
    }
    store(args.common + first, common, inside, aligned);
    if (args.velocity) store(args.velocity + first, velocity, inside, aligned);
    store(args.own + first, own, inside, on_16_bytes(args.own));
  }
}

void codebook_move_cuda(Tensor codes, Tensor scale, Tensor edges, Tensor book, Tensor kind,
                        std::optional<Tensor> factor, Tensor common, std::optional<Tensor> velocity,
                        Tensor own, std::optional<Tensor> before, double lr, double momentum,
                        int64_t bits) {
  Move args = checked(codes, scale, edges, book, kind, factor, common, velocity, own, before, lr,
                      momentum, bits);
  if (args.codebook.size == 0) return;
  Launch launch(common);
  with_bits(args.codebook.bits, [&](auto constant) {
    launch.run(tiles_grid(args.codebook), move_tiles<decltype(constant)::value>, args,
               const_data<uint8_t>(codes));
  });
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, HVD_CUDA_KEY, library) {
  library.impl("codebook_mean", TORCH_BOX(&hvd_compress::codebook_mean_cuda));
  library.impl("codebook_moments", TORCH_BOX(&hvd_compress::codebook_moments_cuda));
  library.impl("codebook_move", TORCH_BOX(&hvd_compress::codebook_move_cuda));
}
