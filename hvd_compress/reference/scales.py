"""Scales of lanes: what a rank says of the size of its values, in words beside theirs, and what all make of the sums.

All arithmetic is float64, operation by operation as written. ``shared_scale``: float64, (groups,), the scale that all ranks
hold alike, within ``SMALLEST`` to ``LARGEST``. ``kind``: int64, (groups,), 0 where averages look Gaussian, 1 where
Laplacian. ``header``: int64, (1 + ceil(groups / 2),): how many ranks are invalid, then two groups' ratios a word.
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
SMOOTHING = 0.25
#: Ratios of a rank's scale to the shared_scale one travel in steps of 1 / RATIO_STEPS.
RATIO_STEPS = 1024


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
    return bounded(old * (1 - SMOOTHING) + new * SMOOTHING)


def _sums(values: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    table = torch.empty(len(edges) - 1, 3, dtype=torch.float64, device=values.device)
    moments(values, edges, table)
    return table[:, 0], table[:, 1]


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
    """Before values are written into lanes: every group's step of the grid, and this rank's ``header``.

    Per group, with the root mean square of its values::

        step  = shared_scale * grid[kind], as float32
        ratio = clamp(round(rms / shared_scale * 1024), 0, 2**31 // ranks - 1)        (to even)

    A sum of ratios stays below 2**31: so two share a word, the group of even number in its lower half, as values share
    theirs.

    ``values``: float32, (n,). ``edges``: int64, (groups + 1,). ``grid``: float64, (kinds,). ``invalid``: int32, (1,).
    ``step``: float32, (groups,).
    """
    square, _ = _sums(values, edges)
    step.copy_(shared_scale * grid[kind])
    ratio = (
        (root_mean_square(square, edges.diff()) / shared_scale * RATIO_STEPS)
        .round()
        .clamp(0, 2**31 // ranks - 1)
        .long()
    )
    low, high = torch.nn.functional.pad(ratio, (0, -len(ratio) % 2)).view(-1, 2).unbind(1)
    header[:1] = invalid
    header[1:] = low + (high << 32)


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
    """After the average was read: the scales of the next step, from the ranks' summed ``header`` and the average.

    Per group, if it has values (else nothing changes)::

        observed    = shared_scale * sum of ratios / (1024 * ranks)
        next_scale = bounded(shared_scale * 0.75 + observed * 0.25)
        next_kind   = 1 if count * sum of mean**4 / max((sum of mean**2)**2, 1e-300) > 4.5 else 0

    Then, if a rank was invalid, ``mean``, float32, (n,), becomes NaN.
    """
    square, fourth = _sums(mean, edges)
    count = edges.diff()
    words = header[1:]
    sums = torch.stack([words & 0xFFFFFFFF, words >> 32], 1).view(-1)[: len(count)]
    next_scale.copy_(
        torch.where(count > 0, running(shared_scale, divided(shared_scale * sums, RATIO_STEPS * ranks)), shared_scale)
    )
    next_kind.copy_(torch.where(count > 0, kind_of(square, fourth, count), kind))
    mean.masked_fill_(header[0] != 0, float("nan"))
