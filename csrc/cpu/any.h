// Whether threads found something.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>

namespace hvd_compress {

// Shares out 0 to `size`, at least `grain` to a thread: whether find(begin, end) was true of any
// part. Each is gone through, whatever the others found.
template <typename Find>
bool any_part(int64_t size, int64_t grain, const Find& find) {
  std::atomic<bool> any{false};
  torch::stable::parallel_for(0, size, grain, [&](int64_t begin, int64_t end) {
    if (find(begin, end)) any.store(true, std::memory_order_relaxed);
  });
  return any;
}

}  // namespace hvd_compress
