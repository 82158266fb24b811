// Writing past the caches: memory that is written whole need not be read first. Not for what fits
// into them, and is there when it is read next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace hvd_compress {

// Like memcpy, which it is for what does not lie or end on 16 bytes. Other threads see it after
// stream_fence().
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
