// The operator cpu_level.
#include "isa.h"

#include <torch/csrc/stable/library.h>

namespace hvd_compress {
namespace {

int64_t cpu_level() { return isa_level(); }

}  // namespace
}  // namespace hvd_compress

STABLE_TORCH_LIBRARY_IMPL(hvd_compress, CompositeExplicitAutograd, library) {
  library.impl("cpu_level", TORCH_BOX(&hvd_compress::cpu_level));
}
