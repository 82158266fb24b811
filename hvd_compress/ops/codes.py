"""Operators on quantized values: see :mod:`hvd_compress.reference.codes`.

Common: ``values``, ``quantization_error``: float32, (n,), not overlapping. ``scale``: float32, (groups,), > 0.
``edges``: int64, (groups + 1,), ascending from 0 to n. ``codes``: uint8, (ceil(n / 8) * bits,). All are contiguous.
Raises RuntimeError for another dtype, device, size or range.

The contents of ``edges``, ``kind`` and ``base`` are checked on the CPU only. On CUDA, wrong contents give wrong values,
but no access outside the tensors.
"""

from torch import Tensor

from ._load import implementation


def moments(values: Tensor, edges: Tensor, out: Tensor) -> None:
    """Write each group's sum of squares, sum of fourth powers and largest magnitude: ``out``, float64, (groups, 3).

    On CUDA, the row of a group outside the values is not written.
    """
    implementation.moments(values, edges, out)


def lanes_encode(
    values: Tensor,
    scale: Tensor,
    edges: Tensor,
    words: Tensor,
    quantization_error: Tensor,
    bits: int,
    width: int,
    key: int,
) -> None:
    """Write values as integers of ``bits`` bits into lanes of ``width`` bits.

    ``words``: int64, (ceil(n / (64 // width)),). ``2 <= bits <= 24``, ``bits <= width <= 32``. ``key``: 0 to 2**32 - 1
    for stochastic rounding, -1 for rounding to nearest.
    """
    implementation.lanes_encode(values, scale, edges, words, quantization_error, bits, width, key)


def lanes_decode(words: Tensor, scale: Tensor, edges: Tensor, values: Tensor, width: int, factor: float) -> None:
    """Read sums of lanes: ``values`` become ``sum * (scale * factor)``."""
    implementation.lanes_decode(words, scale, edges, values, width, factor)


def codebook_encode(
    values: Tensor,
    scale: Tensor,
    edges: Tensor,
    book: Tensor,
    kind: Tensor,
    codes: Tensor,
    quantization_error: Tensor,
    bits: int,
) -> None:
    """Write the code of the nearest level of ``book[kind] * scale``.

    ``book``: float32, (kinds, 2**bits), rows ascending (checked on the CPU only). ``kind``: int64, (groups,), a row
    of ``book`` each; out of range, row 0 on CUDA. ``1 <= bits <= 8``.
    """
    implementation.codebook_encode(values, scale, edges, book, kind, codes, quantization_error, bits)


def codebook_decode(
    codes: Tensor, scale: Tensor, edges: Tensor, book: Tensor, kind: Tensor, values: Tensor, bits: int, add: bool
) -> None:
    """Write the decoded values, or ``add`` them to ``values``."""
    implementation.codebook_decode(codes, scale, edges, book, kind, values, bits, add)


def range_encode(
    values: Tensor,
    base: Tensor,
    edges: Tensor,
    codes: Tensor,
    quantization_error: Tensor,
    bits: int,
    mantissa: int,
    positive: int,
) -> None:
    """Write range-based floats of ``bits`` bits, of which ``mantissa`` are the fraction.

    ``base``: int64, (groups,), >= 1. ``4 <= bits <= 16``, ``1 <= mantissa <= 22``, ``1 <= positive <= 2**bits - 2``.
    """
    implementation.range_encode(values, base, edges, codes, quantization_error, bits, mantissa, positive)


def range_decode(
    codes: Tensor, base: Tensor, edges: Tensor, values: Tensor, bits: int, mantissa: int, positive: int, add: bool
) -> None:
    """Write the decoded values, or ``add`` them to ``values``."""
    implementation.range_decode(codes, base, edges, values, bits, mantissa, positive, add)
