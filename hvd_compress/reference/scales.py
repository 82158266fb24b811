"""Scales of lanes: what a rank says of the size of its values, in words beside theirs, and what all make of the sums.

All arithmetic is float64, operation by operation as written. ``shared``: float64, (groups,), the scale that all ranks
hold alike, within ``SMALLEST`` to ``LARGEST``. ``kind``: int64, (groups,), 0 where averages look Gaussian, 1 where
Laplacian. ``rest``: int64, (1 + ceil(groups / 2),): how many ranks are invalid, then two groups' ratios a word.
"""

import torch
from torch import Tensor

from .codes import moments

#: A scale outside is taken for the nearer one, so that its reciprocal and its products stay finite.
SMALLEST = 1e-20
LARGEST = 1e20
#: Between a Gaussian's kurtosis, 3, and a Laplacian's, 6.
KURTOSIS = 4.5
#: The share of a new observation in a running scale: a group of few slots is noisy.
NEW = 0.25
#: Ratios of a rank's scale to the shared one travel in steps of 1 / FINE.
FINE = 1024


def bounded(scale: Tensor) -> Tensor:
    """Within what the operators can divide by."""
    return scale.nan_to_num(nan=SMALLEST, posinf=LARGEST).clamp(SMALLEST, LARGEST)


def root_mean_square(square: Tensor, count: Tensor) -> Tensor:
    """Of the sum of squares of ``count`` values; 0 of none."""
    return (square / count.clamp(min=1)).sqrt()


def kind_of(square: Tensor, fourth: Tensor, count: Tensor) -> Tensor:
    """By the kurtosis, from the sums of squares and of fourth powers."""
    kurtosis = count * fourth / square.square().clamp(min=1e-300)
    return (kurtosis > KURTOSIS).long()


def divided(dividend: Tensor, divisor: float) -> Tensor:
    """The quotient, rounded once: by a plain number, torch's CUDA code would multiply with the reciprocal."""
    return dividend / torch.full_like(dividend, divisor)


def running(old: Tensor, new: Tensor) -> Tensor:
    """A scale that follows what is observed."""
    return bounded(old * (1 - NEW) + new * NEW)


def _sums(values: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    table = torch.empty(len(edges) - 1, 3, dtype=torch.float64, device=values.device)
    moments(values, edges, table)
    return table[:, 0], table[:, 1]


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
    """Before values are written into lanes: every group's step of the grid, and this rank's ``rest``.

    Per group, with the root mean square of its values::

        step  = shared * grid[kind], as float32
        ratio = clamp(round(rms / shared * 1024), 0, 2**31 // ranks - 1)        (to even)

    A sum of ratios stays below 2**31: so two share a word, the group of even number in its lower half, as values share
    theirs.

    ``values``: float32, (n,). ``edges``: int64, (groups + 1,). ``grid``: float64, (kinds,). ``invalid``: int32, (1,).
    ``step``: float32, (groups,).
    """
    square, _ = _sums(values, edges)
    step.copy_(shared * grid[kind])
    ratio = (root_mean_square(square, edges.diff()) / shared * FINE).round().clamp(0, 2**31 // ranks - 1).long()
    low, high = torch.nn.functional.pad(ratio, (0, -len(ratio) % 2)).view(-1, 2).unbind(1)
    rest[:1] = invalid
    rest[1:] = low + (high << 32)


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
    """After the average was read: the scales of the next step, from the ranks' summed ``rest`` and the average.

    Per group, if it has values (else nothing changes)::

        observed    = shared * sum of ratios / (1024 * ranks)
        next_shared = bounded(shared * 0.75 + observed * 0.25)
        next_kind   = 1 if count * sum of mean**4 / max((sum of mean**2)**2, 1e-300) > 4.5 else 0

    Then, if a rank was invalid, ``mean``, float32, (n,), becomes NaN.
    """
    square, fourth = _sums(mean, edges)
    count = edges.diff()
    words = rest[1:]
    sums = torch.stack([words & 0xFFFFFFFF, words >> 32], 1).view(-1)[: len(count)]
    next_shared.copy_(torch.where(count > 0, running(shared, divided(shared * sums, FINE * ranks)), shared))
    next_kind.copy_(torch.where(count > 0, kind_of(square, fourth, count), kind))
    mean.masked_fill_(rest[0] != 0, float("nan"))
