// A parallel loop that returns what its parts found.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>

namespace hvd_compress {

// Calls find(begin, end), which returns bits, in parallel for parts of 0 to `size`, of at least
// `grain` each. Returns the bits that are set for any part. All parts are processed.
template <typename Find>
uint32_t any_part(int64_t size, int64_t grain, const Find& find) {
  std::atomic<uint32_t> any{0};
  torch::stable::parallel_for(0, size, grain, [&](int64_t begin, int64_t end) {
    any.fetch_or(find(begin, end), std::memory_order_relaxed);
  });
  return any;
}

}  // namespace hvd_compress
