// Groups on the CPU: checks of the edges, and iteration.
#pragma once

#include "../groups.h"

namespace hvd_compress {

// Checks that every value is in a group.
inline void check_edges(const Groups& groups, int64_t size) {
  int64_t last = 0;
  for (int64_t i = 0; i <= groups.count; ++i) {
    int64_t edge = groups.edges[i];
    STD_TORCH_CHECK(last <= edge && edge <= size && (i > 0 || edge == 0),
                    "edges must ascend from 0 to ", size, ", got ", edge, " in entry ", i,
                    " after ", last);
    last = edge;
  }
  STD_TORCH_CHECK(last == size, "edges must end at ", size, ", got ", last);
}

// Calls work(group, first, last) for each run of values of one group from begin to end. `group`
// must be that of `begin` or an earlier one, and becomes that of the last value.
template <typename Work>
HVD_BODY void for_runs(const Groups& groups, int64_t& group, int64_t begin, int64_t end,
                       const Work& work) {
  while (begin < end) {
    while (groups.edges[group + 1] <= begin) ++group;
    int64_t edge = groups.edges[group + 1];
    int64_t stop = edge < end ? edge : end;
    work(group, begin, stop);
    begin = stop;
  }
}

}  // namespace hvd_compress
