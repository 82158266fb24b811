// codebook_mean, codebook_moments and codebook_move on the CPU: decoded values stay in the cache.
#include "../averages.h"

#include "codebook.h"
#include "moments.h"

namespace hvd_compress {
namespace {

constexpr int kStretch = 2048;  // values that are decoded at once
constexpr int64_t kStretchGrain = 16;

struct AddValues {
  static HVD_BODY void run(const float* __restrict from, float* __restrict to, bool add,
                           int64_t count) {
    for (int64_t i = 0; i < count; ++i) to[i] = add ? to[i] + from[i] : from[i];
  }
};

struct Scale {
  static HVD_BODY void run(float* values, float factor, int64_t count) {
    for (int64_t i = 0; i < count; ++i) values[i] *= factor;
  }
};

void codebook_mean_cpu(Tensor rows, Tensor values, Tensor scale, Tensor edges, Tensor book,
                       Tensor kind, Tensor mean, Tensor moments, int64_t rank, int64_t skip,
                       int64_t bits) {
  Mean args = checked(rows, values, scale, edges, book, kind, mean, moments, rank, skip, bits);
  std::vector<Row> table = checked_rows(args.codebook, args.ranks);
  std::vector<Rows> senders;
  for (int64_t i = 0; i < args.ranks; ++i) senders.push_back({args.of(i), table.data(), nullptr});
  DecodeUnits decode = decoder(args.codebook.bits);
  auto write = [&](int64_t from, int64_t to) {
    for (int64_t first = from; first < to; first += kStretch) {
      int64_t last = std::min(first + kStretch, to), count = last - first;
      for (int64_t i = 0; i < args.ranks; ++i) {
        if (i == args.rank) {
          run_best<AddValues>(args.values + first, args.mean + first, i > 0, count);
        } else {
          decode(&senders[i], args.codes + i * args.stride, args.mean + first, i > 0, first / 8,
                 (last + 7) / 8);
        }
      }
      run_best<Scale>(args.mean + first, args.factor, count);
    }
  };
  for_moments(args.moments.groups, args.mean, write,
              [&](int64_t group, const Sums& sums) { args.moments.store(group, sums); });
}

void codebook_moments_cpu(Tensor codes, Tensor scale, Tensor edges, Tensor book, Tensor kind,
                          Tensor out, int64_t count, int64_t bits) {
  Codebook args = checked_moments(codes, scale, edges, book, kind, out, count, bits);
  std::vector<Row> table = checked_rows(args);
  Rows rows{args, table.data(), nullptr};
  DecodeUnits decode = decoder(args.bits);
  int64_t parts = (count + kPart - 1) / kPart;
  std::vector<Sums> sums(parts);
  torch::stable::parallel_for(0, parts, kPartGrain, [&](int64_t begin, int64_t end) {
    alignas(64) float decoded[kPart];
    for (int64_t part = begin; part < end; ++part) {
      int64_t first = part * kPart, last = std::min(first + kPart, count);
      decode(&rows, const_data<uint8_t>(codes), decoded, false, first / 8, (last + 7) / 8);
      sums[part] = run_best<PartMoments>(decoded, last - first);
    }
  });
  Sums all = parts > 0 ? group_moments(sums.data(), parts) : Sums{};
  Moments{nullptr, data<double>(out), {}, 0}.store(0, all);
}

// The entries `first` to `last`, by their averages.
struct MoveEntries {
  static HVD_BODY void run(const Move* args, const float* __restrict averages, int64_t first,
                           int64_t last) {
    float* __restrict common = args->common;
    float* __restrict velocity = args->velocity;
    const float* before = args->before;
    float* __restrict own = args->own;
    float factor = args->factor_or_one(), none = 0.0f;
    for (int64_t i = first; i < last; ++i) {
      float now =
          moved(*args, averages[i - first] * factor, common[i], velocity ? velocity[i] : none);
      if (before) now = (own[i] - before[i]) + now;
      own[i] = now;
    }
  }
};

void codebook_move_cpu(Tensor codes, Tensor scale, Tensor edges, Tensor book, Tensor kind,
                       std::optional<Tensor> factor, Tensor common, std::optional<Tensor> velocity,
                       Tensor own, std::optional<Tensor> before, double lr, double momentum,
                       int64_t bits) {
  Move args = checked(codes, scale, edges, book, kind, factor, common, velocity, own, before, lr,
                      momentum, bits);
  std::vector<Row> table = checked_rows(args.codebook);
  Rows rows{args.codebook, table.data(), nullptr};
  DecodeUnits decode = decoder(args.codebook.bits);
  int64_t size = args.codebook.size, stretches = (size + kStretch - 1) / kStretch;
  torch::stable::parallel_for(0, stretches, kStretchGrain, [&](int64_t begin, int64_t end) {
    alignas(64) float decoded[kStretch];
    for (int64_t first = begin * kStretch; first < std::min(end * kStretch, size);
         first += kStretch) {
      int64_t last = std::min(first + kStretch, size);
      decode(&rows, const_data<uint8_t>(codes), decoded, false, first / 8, (last + 7) / 8);
      run_best<MoveEntries>(&args, decoded, first, last);
    }
  });
}

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CPU, library) {
  library.impl("codebook_mean", TORCH_BOX(&hvd_compress::codebook_mean_cpu));
  library.impl("codebook_moments", TORCH_BOX(&hvd_compress::codebook_moments_cpu));
  library.impl("codebook_move", TORCH_BOX(&hvd_compress::codebook_move_cpu));
}
