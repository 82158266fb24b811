// Loads and stores of a block's entries: 8 adjacent entries per lane of a warp.
#pragma once

#include "warp.h"

namespace hvd_compress {

inline bool on_16_bytes(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

// 16 bytes at a time if `aligned`. Entries from `inside` on are 0.
template <typename T>
__device__ __forceinline__ void load(T (&to)[kPerLane], const T* from, int inside, bool aligned) {
  if (aligned && inside == kPerLane) {
    uint4 words[sizeof(to) / sizeof(uint4)];
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(to) / sizeof(uint4)); ++i) {
      words[i] = reinterpret_cast<const uint4*>(from)[i];
    }
    memcpy(static_cast<void*>(to), words, sizeof(to));
  } else {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) to[i] = i < inside ? from[i] : static_cast<T>(0.0f);
  }
}

template <typename T>
__device__ __forceinline__ void store(T* to, const T (&from)[kPerLane], int inside, bool aligned) {
  if (aligned && inside == kPerLane) {
    uint4 words[sizeof(from) / sizeof(uint4)];
    memcpy(words, static_cast<const void*>(from), sizeof(from));
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(from) / sizeof(uint4)); ++i) {
      reinterpret_cast<uint4*>(to)[i] = words[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (i < inside) to[i] = from[i];
    }
  }
}

}  // namespace hvd_compress
