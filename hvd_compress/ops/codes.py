"""Operators on values as they are written on the wire: see :mod:`hvd_compress.reference.codes`.

Common to all: ``values``, ``quantization_error``: float32, (n,). ``scale``: float32, (groups,), > 0. ``edges``: int64, (groups + 1,),
ascending from 0 to n (checked on the CPU only). ``codes``: uint8, (ceil(n / 8) * bits,). All are contiguous, and
``quantization_error`` is other memory than ``values``. Raises RuntimeError for another dtype, device, size or range.

What is checked on the CPU only, CUDA's operators gather as it is. They stay within their tensors, but with other edges
values get a scale that is not their group's.
"""

from torch import Tensor

from ._load import implementation


def moments(values: Tensor, edges: Tensor, out: Tensor) -> None:
    """Per group the sum of squares, of fourth powers, and the largest magnitude: ``out``, float64, (groups, 3).

    On CUDA the row of a group that does not lie within the values stays as it is.
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
    """Write values as integers of ``bits`` bits into lanes of ``width`` bits of ``words``, int64,
    (ceil(n / (64 // width)),).

    ``2 <= bits <= 24``, ``bits <= width <= 32``. ``key``: 0 to 2**32 - 1 rounds stochastically, -1 to nearest.
    """
    implementation.lanes_encode(values, scale, edges, words, quantization_error, bits, width, key)


def lanes_decode(words: Tensor, scale: Tensor, edges: Tensor, values: Tensor, width: int, factor: float) -> None:
    """Read the sums of lanes: ``values`` become ``sum * (scale * factor)``."""
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
    """Write the number of the nearest level of ``book[kind] * scale``.

    ``book``: float32, (kinds, 2**bits), rows ascending. ``kind``: int64, (groups,), a row each (both checked on the CPU
    only: CUDA takes the first row for one that there is not). ``1 <= bits <= 8``.
    """
    implementation.codebook_encode(values, scale, edges, book, kind, codes, quantization_error, bits)


def codebook_decode(
    codes: Tensor, scale: Tensor, edges: Tensor, book: Tensor, kind: Tensor, values: Tensor, bits: int, add: bool
) -> None:
    """Write the levels to ``values``, or ``add`` them."""
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
    """Write range-based floats of ``bits`` bits, ``mantissa`` of them the fraction.

    ``base``: int64, (groups,), >= 1 (checked on the CPU only). ``4 <= bits <= 16``, ``1 <= mantissa <= 22``,
    ``1 <= positive <= 2**bits - 2``.
    """
    implementation.range_encode(values, base, edges, codes, quantization_error, bits, mantissa, positive)


def range_decode(
    codes: Tensor, base: Tensor, edges: Tensor, values: Tensor, bits: int, mantissa: int, positive: int, add: bool
) -> None:
    """Write what range-based floats stand for to ``values``, or ``add`` it."""
    implementation.range_decode(codes, base, edges, values, bits, mantissa, positive, add)
