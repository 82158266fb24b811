// Non-temporal stores, which bypass the caches: faster for data that does not fit into them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace hvd_compress {

// memcpy with non-temporal stores if `to` and `bytes` are multiples of 16. Visible to other threads
// after stream_fence().
inline void stream_copy(void* to, const void* from, size_t bytes) {
#ifdef __SSE2__
  if (reinterpret_cast<uintptr_t>(to) % sizeof(__m128i) == 0 && bytes % sizeof(__m128i) == 0) {
    __m128i* target = static_cast<__m128i*>(to);
    const char* source = static_cast<const char*>(from);
    for (size_t i = 0; i < bytes; i += sizeof(__m128i)) {
      _mm_stream_si128(target++, _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i)));
    }
    return;
  }
#endif
  std::memcpy(to, from, bytes);
}

inline void stream_fence() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

}  // namespace hvd_compress
