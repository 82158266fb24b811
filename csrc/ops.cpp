// Every operator's schema. What they compute: hvd_compress/reference.py.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(hvd_compress, library) {
  library.def(
      "accumulate_select(Tensor(a!) grad, Tensor(b!) residual, Tensor weight, "
      "Tensor(c!)? velocity, Tensor floor, Tensor(d!) offsets, Tensor(e!) invalid, "
      "float scale, float momentum, int slots, int first_slot, int phase, "
      "int run, int ranks, int position, int key, int explore) -> ()");
  library.def(
      "take(Tensor(a!) residual, Tensor(b!)? velocity, Tensor offsets, Tensor segments, "
      "Tensor invalid, Tensor(c!) payload, int phase, float limit) -> ()");
  library.def(
      "put(Tensor(a!)[] grads, Tensor(b!) residual, Tensor offsets, Tensor segments, "
      "Tensor total, Tensor sent, int phase, float scale) -> ()");
}
