// Groups: which scale a value has.
#pragma once

#include "block.h"

namespace hvd_compress {

struct Groups {
  const int64_t* edges;  // count + 1
  int64_t count;

  // The group that holds value `i`: the last that begins at or before it. Never outside the table,
  // whatever the edges hold.
  HVD_BODY int64_t find(int64_t i) const {
    int64_t low = 0, high = count - 1;
    while (low < high) {
      int64_t middle = (low + high + 1) / 2;
      if (edges[middle] <= i) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
};

}  // namespace hvd_compress
