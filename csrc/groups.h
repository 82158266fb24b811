// Groups: which scale a value has.
#pragma once

#include "block.h"

namespace hvd_compress {

struct Groups {
  const int64_t* edges;  // count + 1
  int64_t count;

  HVD_BODY int64_t size(int64_t group) const { return edges[group + 1] - edges[group]; }

  // Whether a group lies within so many values: the host of a GPU cannot check it.
  HVD_BODY bool within(int64_t group, int64_t values) const {
    return edges[group] >= 0 && edges[group + 1] <= values;
  }

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
