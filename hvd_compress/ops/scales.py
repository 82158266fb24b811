"""Operators on the scales of lanes: see :mod:`hvd_compress.reference.scales`.

``edges``: int64, (groups + 1,), ascending from 0 to n (checked on the CPU only: on CUDA nothing is written for a group
that does not lie within the values), at least one group. ``shared``: float64, (groups,), 1e-20 to 1e20 (not checked).
``kind``: int64, (groups,). ``rest``: int64, (1 + ceil(groups / 2),). ``1 <= ranks <= 2**30``. All are contiguous.
Raises RuntimeError for another dtype, device, size or range.
"""

from torch import Tensor

from ._load import implementation


def lanes_prepare(
    values: Tensor,
    edges: Tensor,
    shared: Tensor,
    kind: Tensor,
    grid: Tensor,
    invalid: Tensor,
    step: Tensor,
    rest: Tensor,
    ranks: int,
) -> None:
    """Write each group's step of the grid, and to ``rest`` what this rank says of its scales.

    ``values``: float32, (n,), finite. ``grid``: float64, (kinds,); each ``kind`` is one of them (checked on the CPU
    only). ``invalid``: int32, (1,). ``step``: float32, (groups,).
    """
    implementation.lanes_prepare(values, edges, shared, kind, grid, invalid, step, rest, ranks)


def lanes_follow(
    mean: Tensor,
    edges: Tensor,
    shared: Tensor,
    kind: Tensor,
    rest: Tensor,
    next_shared: Tensor,
    next_kind: Tensor,
    ranks: int,
) -> None:
    """Write the scales of the next step, from the ranks' summed ``rest`` and their ``mean``, float32, (n,), which
    becomes NaN if one of them was invalid.

    ``next_shared``, ``next_kind``: as ``shared`` and ``kind``.
    """
    implementation.lanes_follow(mean, edges, shared, kind, rest, next_shared, next_kind, ranks)
