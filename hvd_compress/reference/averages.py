"""Averages of values that were received in codes. The vocabulary is that of :mod:`.codes`."""

import torch
from torch import Tensor

from .blocks import usable
from .codes import codebook_decode, moments, store


def codebook_mean(
    rows: Tensor, values: Tensor, scale: Tensor, edges: Tensor, book: Tensor, kind: Tensor, mean: Tensor, out: Tensor,
    rank: int, skip: int, bits: int,
) -> None:  # fmt: skip
    """Write the mean of all ranks' values, those of ``rank`` as they are and the others' decoded, and its moments.

    The values are added in the order of the ranks, and the sum is multiplied by ``1 / ranks``.

    ``rows``: uint8, (ranks, bytes): the codes of a rank begin after ``skip`` bytes. ``values``, ``mean``: float32,
    (n,). ``scale``, ``kind``: (ranks, groups). The others: as in :func:`codebook_decode` and :func:`moments`.
    """
    size = -(-len(values) // 8) * bits
    for sender, row in enumerate(rows):
        if sender != rank:
            codebook_decode(row[skip:][:size], scale[sender], edges, book, kind[sender], mean, bits, sender > 0)
        else:
            store(mean, values, sender > 0)
    mean.mul_(1.0 / len(rows))
    moments(mean, edges, out)


def codebook_moments(
    codes: Tensor, scale: Tensor, edges: Tensor, book: Tensor, kind: Tensor, out: Tensor, count: int, bits: int
) -> None:
    """Write the :func:`moments` of all ``count`` decoded values as one group: ``out``, float64, (1, 3)."""
    values = torch.empty(count, dtype=torch.float32, device=codes.device)
    codebook_decode(codes, scale, edges, book, kind, values, bits, False)
    moments(values, torch.tensor([0, count], dtype=torch.int64, device=codes.device), out)


def codebook_move(
    codes: Tensor, scale: Tensor, edges: Tensor, book: Tensor, kind: Tensor, factor: Tensor | None, common: Tensor,
    velocity: Tensor | None, own: Tensor, before: Tensor | None, lr: float, momentum: float, bits: int,
) -> None:  # fmt: skip
    """Move common weights A by decoded averages u, and make this rank's weights of them::

        u = decoded * factor;  s = u where it is usable, else 0;  v = momentum v + s;  A = A + lr (s + momentum v)
        w = (w - before) + (A + (u - s))

    Without a velocity, v is 0; without ``before``, ``w - before`` is.

    ``factor``: float32, one entry, or None for 1. ``common``, ``velocity``, ``own`` (w), ``before``: float32, dense, in
    one memory order. The others: as in :func:`codebook_decode`.
    """
    average, flat = torch.empty(common.numel(), dtype=torch.float32, device=common.device), ((common.numel(),), (1,))
    codebook_decode(codes, scale, edges, book, kind, average, bits, False)
    if factor is not None:
        average *= factor
    step = torch.where(usable(average), average, 0.0)
    left = average - step
    if velocity is not None:
        v = velocity.as_strided(*flat).mul_(momentum).add_(step)
        step = step + v * momentum
    now = common.as_strided(*flat).add_(step if lr == 1.0 else step * lr) + left
    if before is not None:
        now = (own.as_strided(*flat) - before.as_strided(*flat)) + now
    own.as_strided(*flat).copy_(now)
