"""Operators on the scales of lanes: see :mod:`hvd_compress.reference.scales`.

``edges``: int64, (groups + 1,), at least one group, ascending from 0 to n (checked on the CPU only; on CUDA, groups
outside the values are skipped). ``shared_scale``: float64, (groups,), 1e-20 to 1e20 (not checked). ``kind``: int64,
(groups,). ``header``: int64, (1 + ceil(groups / 2),). ``1 <= ranks <= 2**30``. All are contiguous.
Raises RuntimeError for another dtype, device, size or range.
"""

from torch import Tensor

from ._load import implementation


def lanes_prepare(
    values: Tensor,
    edges: Tensor,
    shared_scale: Tensor,
    kind: Tensor,
    grid: Tensor,
    invalid: Tensor,
    step: Tensor,
    header: Tensor,
    ranks: int,
) -> None:
    """Write each group's ``step`` of the grid, float32, (groups,), and this rank's ``header``.

    ``values``: float32, (n,), finite. ``grid``: float64, (kinds,); each ``kind`` is a row of it (checked on the CPU
    only). ``invalid``: int32, (1,).
    """
    implementation.lanes_prepare(values, edges, shared_scale, kind, grid, invalid, step, header, ranks)


def lanes_update(
    mean: Tensor,
    edges: Tensor,
    shared_scale: Tensor,
    kind: Tensor,
    header: Tensor,
    next_scale: Tensor,
    next_kind: Tensor,
    ranks: int,
) -> None:
    """Write the scales of the next step, from the ranks' summed ``header`` and their ``mean``, float32, (n,).

    ``mean`` is set to NaN if a rank was invalid. ``next_scale``, ``next_kind``: as ``shared_scale`` and ``kind``.
    """
    implementation.lanes_update(mean, edges, shared_scale, kind, header, next_scale, next_kind, ranks)
