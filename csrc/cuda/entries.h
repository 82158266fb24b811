// Loads and stores of a block's entries by one warp.
#pragma once

#include <type_traits>

#include "warp.h"

namespace hvd_compress {

// A lane has entries in two parts of kAdjacent, half a block apart. So a warp loads or stores 128
// adjacent entries at a time: for float32, 512 bytes in words of 16.
constexpr int kAdjacent = 4;
static_assert(kPerLane == 2 * kAdjacent);

// The index in its block of this lane's i-th entry. It ascends with i.
__device__ __forceinline__ int index_of(int i) {
  return i / kAdjacent * (kBlock / 2) + lane_id() * kAdjacent + i % kAdjacent;
}

HVD_BODY bool on_16_bytes(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

// kAdjacent entries in one word.
template <typename T>
using Adjacent = std::conditional_t<sizeof(T) == 4, uint4, uint2>;

// This lane's entries of a block of which `inside` exist; the others are 0. `aligned`: the tensor
// begins on 16 bytes.
template <typename T>
__device__ __forceinline__ void load(T (&to)[kPerLane], const T* block, int inside, bool aligned) {
#pragma unroll
  for (int part = 0; part < kPerLane; part += kAdjacent) {
    int index = index_of(part);
    if (aligned && index + kAdjacent <= inside) {
      Adjacent<T> word = *reinterpret_cast<const Adjacent<T>*>(block + index);
      memcpy(static_cast<void*>(to + part), &word, sizeof(word));
    } else {
#pragma unroll
      for (int i = 0; i < kAdjacent; ++i) {
        to[part + i] = index + i < inside ? block[index + i] : static_cast<T>(0.0f);
      }
    }
  }
}

template <typename T>
__device__ __forceinline__ void store(T* block, const T (&from)[kPerLane], int inside,
                                      bool aligned) {
#pragma unroll
  for (int part = 0; part < kPerLane; part += kAdjacent) {
    int index = index_of(part);
    if (aligned && index + kAdjacent <= inside) {
      Adjacent<T> word;
      memcpy(&word, static_cast<const void*>(from + part), sizeof(word));
      store_word(reinterpret_cast<Adjacent<T>*>(block + index), word);
    } else {
#pragma unroll
      for (int i = 0; i < kAdjacent; ++i) {
        if (index + i < inside) block[index + i] = from[part + i];
      }
    }
  }
}

}  // namespace hvd_compress
