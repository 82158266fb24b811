// One group of lanes_prepare and lanes_follow.
#pragma once

#include <cmath>

#include "moments.h"

namespace hvd_compress {

// The specification's, hvd_compress/reference/scales.py.
constexpr double kSmallest = 1e-20;
constexpr double kLargest = 1e20;
constexpr double kKurtosis = 4.5;
constexpr double kNew = 0.25;
constexpr double kFine = 1024.0;

struct Scales {
  Groups groups;
  int64_t size;  // of values
  const double* shared;
  const int64_t* kind;
  int64_t ranks;
};

struct Prepare {
  Scales scales;
  const float* values;
  const double* grid;
  int64_t kinds;
  const int32_t* invalid;
  float* step;
  int64_t* rest;
};

struct Follow {
  Scales scales;
  float* mean;
  const int64_t* rest;
  double* next_shared;
  int64_t* next_kind;
};

// Where a group's ratio lies in `rest`: the lower or upper half of a word, lowest byte first.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

HVD_BODY uint32_t* half_of(int64_t* rest, int64_t group) {
  return reinterpret_cast<uint32_t*>(rest + 1) + group;
}

HVD_BODY const uint32_t* half_of(const int64_t* rest, int64_t group) {
  return reinterpret_cast<const uint32_t*>(rest + 1) + group;
}

HVD_BODY double bounded(double scale) {
  scale = scale > kSmallest ? scale : kSmallest;  // as is a NaN
  return scale < kLargest ? scale : kLargest;
}

HVD_BODY void prepare_group(const Prepare& args, int64_t group, const Sums& sums) {
  double shared = args.scales.shared[group];
  int64_t count = args.scales.groups.size(group), kind = args.scales.kind[group];
  kind = kind < 0 || kind >= args.kinds ? 0 : kind;  // the host of a GPU cannot check this
  args.step[group] = static_cast<float>(shared * args.grid[kind]);

  double rms = sqrt(sums.square / static_cast<double>(count < 1 ? 1 : count));
  double ratio = rint(rms / shared * kFine);
  double most = static_cast<double>((int64_t{1} << 31) / args.scales.ranks - 1);
  uint32_t half = static_cast<uint32_t>(ratio < most ? ratio : most);
  memcpy(half_of(args.rest, group), &half, sizeof(half));
  if (group == 0) args.rest[0] = *args.invalid;
  if (group + 1 == args.scales.groups.count && group % 2 == 0) {
    uint32_t none = 0;
    memcpy(half_of(args.rest, group + 1), &none, sizeof(none));
  }
}

HVD_BODY void follow_group(const Follow& args, int64_t group, const Sums& sums) {
  double shared = args.scales.shared[group];
  int64_t count = args.scales.groups.size(group), kind = args.scales.kind[group];
  if (count > 0) {
    uint32_t half;
    memcpy(&half, half_of(args.rest, group), sizeof(half));
    double said = shared * static_cast<double>(half);
    double observed = said / (kFine * static_cast<double>(args.scales.ranks));
    shared = bounded(shared * (1.0 - kNew) + observed * kNew);
    double square = sums.square * sums.square;
    square = square < 1e-300 ? 1e-300 : square;
    kind = static_cast<double>(count) * sums.fourth / square > kKurtosis;
  }
  args.next_shared[group] = shared;
  args.next_kind[group] = kind;
}

}  // namespace hvd_compress
