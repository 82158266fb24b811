// A parallel loop that returns whether any part found something.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>

namespace hvd_compress {

// Calls find(begin, end) in parallel for parts of 0 to `size`, of at least `grain` each. Returns
// whether it was true for any part. All parts are processed.
template <typename Find>
bool any_part(int64_t size, int64_t grain, const Find& find) {
  std::atomic<bool> any{false};
  torch::stable::parallel_for(0, size, grain, [&](int64_t begin, int64_t end) {
    if (find(begin, end)) any.store(true, std::memory_order_relaxed);
  });
  return any;
}

}  // namespace hvd_compress
