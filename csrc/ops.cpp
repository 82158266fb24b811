// Every operator's schema. What they compute: hvd_compress/reference/.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(hvd_compress, library) {
  // Blocks: reference/blocks.py.
  library.def(
      "accumulate_select(Tensor(a!) grad, Tensor(b!) residual, Tensor? weight, "
      "Tensor(c!)? velocity, Tensor floor, Tensor(d!) offsets, Tensor(e!) invalid, "
      "Tensor(f!)? means, float scale, float momentum, int slots, int first_slot, int phase, "
      "int run, int ranks, int position, int key, int explore, Tensor? due_offsets=None, "
      "Tensor? due_mean=None, Tensor? due_lost=None, int due_slots=0, int due_first_slot=0, "
      "int due_phase=0) -> ()");
  library.def(
      "select(Tensor score, Tensor(a!) offsets, int slots, int first_slot, int phase, "
      "int run, int ranks, int position, int key, int explore) -> ()");
  library.def(
      "take(Tensor residual, Tensor offsets, Tensor segments, Tensor(a!) values, "
      "int phase) -> ()");
  library.def(
      "put(Tensor(a!)[] grads, Tensor(b!) residual, Tensor(c!)? velocity, Tensor offsets, "
      "Tensor segments, Tensor mean, Tensor? lost, int phase, float scale, "
      "Tensor? block_means=None) -> ()");

  // Blocks' means: reference/means.py.
  library.def(
      "means_send(Tensor(a!) fresh, Tensor(b!) held, Tensor(c!)? velocity, Tensor(d!) out, "
      "Tensor(e!) invalid, float momentum) -> ()");
  library.def("means_keep(Tensor mean, Tensor lost, Tensor(a!) held) -> ()");

  // Codes: reference/codes.py.
  library.def("moments(Tensor values, Tensor edges, Tensor(a!) out) -> ()");
  library.def(
      "lanes_encode(Tensor values, Tensor scale, Tensor edges, Tensor(a!) words, "
      "Tensor(b!) lost, int bits, int width, int key) -> ()");
  library.def(
      "lanes_decode(Tensor words, Tensor scale, Tensor edges, Tensor(a!) values, int width, "
      "float factor) -> ()");
  library.def(
      "codebook_encode(Tensor values, Tensor scale, Tensor edges, Tensor book, Tensor kind, "
      "Tensor(a!) codes, Tensor(b!) lost, int bits) -> ()");
  library.def(
      "codebook_decode(Tensor codes, Tensor scale, Tensor edges, Tensor book, Tensor kind, "
      "Tensor(a!) values, int bits, bool add) -> ()");
  library.def(
      "range_encode(Tensor values, Tensor base, Tensor edges, Tensor(a!) codes, "
      "Tensor(b!) lost, int bits, int mantissa, int positive) -> ()");
  library.def(
      "range_decode(Tensor codes, Tensor base, Tensor edges, Tensor(a!) values, int bits, "
      "int mantissa, int positive, bool add) -> ()");

  // Scales of lanes: reference/scales.py.
  library.def(
      "lanes_prepare(Tensor values, Tensor edges, Tensor shared, Tensor kind, Tensor grid, "
      "Tensor invalid, Tensor(a!) step, Tensor(b!) rest, int ranks) -> ()");
  library.def(
      "lanes_follow(Tensor(a!) mean, Tensor edges, Tensor shared, Tensor kind, Tensor rest, "
      "Tensor(b!) next_shared, Tensor(c!) next_kind, int ranks) -> ()");

  // Of the instruction set that the CPU's operators run with: cpu/isa.h.
  library.def("cpu_level() -> int");
}
