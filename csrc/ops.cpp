// The schemas of all operators. They are specified in hvd_compress/reference/.
#include <torch/csrc/stable/library.h>

// Draw in select.h.
#define HVD_DRAW "int phase, int run, int ranks, int position, int key, int explore"

STABLE_TORCH_LIBRARY(hvd_compress, library) {
  // reference/accumulate_select.py
  library.def(
      "accumulate_select(Tensor(a!)[] grads, Tensor(b!) residual, Tensor[] weights, "
      "Tensor(c!)? velocity, Tensor pieces, Tensor floors, Tensor(d!) indices, "
      "Tensor(e!) invalid, Tensor(f!) touched, Tensor(g!)? block_means, float scale, "
      "float momentum, float decay, bool transform, " HVD_DRAW ") -> ()");
  library.def("select(Tensor[] scores, Tensor pieces, Tensor(a!) indices, " HVD_DRAW ") -> ()");

  // reference/scatter.py
  library.def(
      "gather(Tensor residual, Tensor indices, Tensor pieces, Tensor(a!) values, "
      "int phase) -> ()");
  library.def(
      "scatter(Tensor(a!)[] grads, Tensor(b!) residual, Tensor(c!)? velocity, Tensor indices, "
      "Tensor pieces, Tensor mean, Tensor quantization_error, int phase, float scale, "
      "Tensor? block_means=None, bool transform=False, bool sign=False) -> ()");

  // reference/hadamard.py
  library.def("hadamard(Tensor(a!) values) -> ()");

  // reference/block_means.py
  library.def(
      "block_means_send(Tensor(a!) fresh, Tensor(b!) unsent, Tensor(c!)? velocity, Tensor(d!) out, "
      "Tensor(e!) invalid, float momentum) -> ()");
  library.def("block_means_keep(Tensor mean, Tensor quantization_error, Tensor(a!) unsent) -> ()");

  // reference/accumulate.py
  library.def(
      "accumulate(Tensor[] grads, Tensor[] starts, Tensor(a!) residual, Tensor pieces, "
      "Tensor edges, Tensor(b!) out, Tensor(c!)? squares, Tensor(d!) invalid, float scale, "
      "Tensor? codes=None, Tensor? sent_scale=None, Tensor? book=None, Tensor? kind=None, "
      "int bits=0) -> ()");

  // reference/averages.py
  library.def(
      "codebook_mean(Tensor rows, Tensor values, Tensor scale, Tensor edges, Tensor book, "
      "Tensor kind, Tensor(a!) mean, Tensor(b!) out, int rank, int skip, int bits) -> ()");
  library.def(
      "codebook_moments(Tensor codes, Tensor scale, Tensor edges, Tensor book, Tensor kind, "
      "Tensor(a!) out, int count, int bits) -> ()");
  library.def(
      "codebook_move(Tensor codes, Tensor scale, Tensor edges, Tensor book, Tensor kind, "
      "Tensor? factor, Tensor(a!) common, Tensor(b!)? velocity, Tensor(c!) own, Tensor? before, "
      "float lr, float momentum, int bits) -> ()");

  // reference/codes.py
  library.def("moments(Tensor values, Tensor edges, Tensor(a!) out) -> ()");
  library.def(
      "lanes_encode(Tensor values, Tensor scale, Tensor edges, Tensor(a!) words, "
      "Tensor(b!) quantization_error, int bits, int width, int key) -> ()");
  library.def(
      "lanes_decode(Tensor words, Tensor scale, Tensor edges, Tensor(a!) values, int width, "
      "float factor) -> ()");
  library.def(
      "codebook_encode(Tensor values, Tensor scale, Tensor edges, Tensor book, Tensor kind, "
      "Tensor(a!) codes, Tensor(b!)? quantization_error, int bits) -> ()");
  library.def(
      "codebook_decode(Tensor codes, Tensor scale, Tensor edges, Tensor book, Tensor kind, "
      "Tensor(a!) values, int bits, bool add) -> ()");
  library.def(
      "range_encode(Tensor values, Tensor base, Tensor edges, Tensor(a!) codes, "
      "Tensor(b!) quantization_error, int bits, int mantissa, int positive) -> ()");
  library.def(
      "range_decode(Tensor codes, Tensor base, Tensor edges, Tensor(a!) values, int bits, "
      "int mantissa, int positive, bool add) -> ()");

  // reference/scales.py
  library.def(
      "lanes_prepare(Tensor values, Tensor edges, Tensor shared_scale, Tensor kind, Tensor grid, "
      "Tensor invalid, Tensor(a!) step, Tensor(b!) header, int ranks) -> ()");
  library.def(
      "lanes_update(Tensor(a!) mean, Tensor edges, Tensor shared_scale, Tensor kind, Tensor "
      "header, "
      "Tensor(b!) next_scale, Tensor(c!) next_kind, int ranks) -> ()");

  // The instruction set of the CPU operators: cpu/isa.h.
  library.def("cpu_level() -> int");
}
