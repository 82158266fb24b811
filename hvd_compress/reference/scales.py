"""Scales of lanes, equal on all ranks, and updated from a header that is summed with the values.

All arithmetic is float64, operation by operation as written. ``shared_scale``: float64, (groups,), equal on all ranks,
``SMALLEST`` to ``LARGEST``. ``kind``: int64, (groups,), 0 if the averages look Gaussian, 1 if Laplacian.
``header``: int64, (1 + ceil(groups / 2),): the number of invalid ranks, then the ratios of two groups per word.
"""

import torch
from torch import Tensor

from .codes import moments

#: Scales are clamped to this range, so that their reciprocals and products are finite.
SMALLEST = 1e-20
LARGEST = 1e20
#: The threshold between a Gaussian (kurtosis 3) and a Laplacian (6).
KURTOSIS = 4.5
#: The weight of a new observation in a running scale; groups of few slots are noisy.
SMOOTHING = 0.25
#: The ratio of a rank's scale to the shared one is sent in steps of 1 / RATIO_STEPS.
RATIO_STEPS = 1024


def bounded(scale: Tensor) -> Tensor:
    """``scale`` clamped to the range that the operators can divide by; a NaN becomes ``SMALLEST``."""
    return scale.nan_to_num(nan=SMALLEST, posinf=LARGEST).clamp(SMALLEST, LARGEST)


def root_mean_square(square: Tensor, count: Tensor) -> Tensor:
    """Returns the root mean square by the sum of squares of ``count`` values; 0 if there are none."""
    return (square / count.clamp(min=1)).sqrt()


def kind_of(square: Tensor, fourth: Tensor, count: Tensor) -> Tensor:
    """0 (Gaussian) or 1 (Laplacian) by the kurtosis, from the sums of squares and of fourth powers."""
    kurtosis = count * fourth / square.square().clamp(min=1e-300)
    return (kurtosis > KURTOSIS).long()


def divided(dividend: Tensor, divisor: float) -> Tensor:
    """The quotient, rounded once. (For a Python number, torch multiplies by the reciprocal on CUDA.)"""
    return dividend / torch.full_like(dividend, divisor)


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
    """Called before :func:`lanes_encode`: write each group's ``step`` of the grid and this rank's ``header``.

    Per group, with the root mean square of its values::

        step  = shared_scale * grid[kind], as float32
        ratio = clamp(round(rms / shared_scale * 1024), 0, 2**31 // ranks - 1)        (ties to even)

    The sum of all ranks' ratios is below 2**31, so two ratios fit in a word, that of the even group in the lower half.

    ``values``: float32, (n,). ``edges``: int64, (groups + 1,). ``grid``: float64, (kinds,). ``invalid``: int32, (1,).
    ``step``: float32, (groups,).
    """
    square, _ = _sums(values, edges)
    step.copy_(shared_scale * grid[kind])
    ratio = root_mean_square(square, edges.diff()) / shared_scale * RATIO_STEPS
    ratio = ratio.round().clamp(0, 2**31 // ranks - 1).long()
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
    """Called after :func:`lanes_decode`: write the scales of the next step, from the ranks' summed ``header`` and the
    mean.

    Per group with values (for an empty one, scale and kind are copied)::

        observed   = shared_scale * sum of ratios / (1024 * ranks)
        next_scale = bounded(shared_scale * 0.75 + observed * 0.25)
        next_kind  = 1 if count * sum of mean**4 / max((sum of mean**2)**2, 1e-300) > 4.5 else 0

    If a rank was invalid, ``mean``, float32, (n,), is then set to NaN.
    """
    square, fourth = _sums(mean, edges)
    count = edges.diff()
    words = header[1:]
    sums = torch.stack([words & 0xFFFFFFFF, words >> 32], 1).view(-1)[: len(count)]
    observed = divided(shared_scale * sums, RATIO_STEPS * ranks)
    running = bounded(shared_scale * (1 - SMOOTHING) + observed * SMOOTHING)
    next_scale.copy_(torch.where(count > 0, running, shared_scale))
    next_kind.copy_(torch.where(count > 0, kind_of(square, fourth, count), kind))
    mean.masked_fill_(header[0] != 0, float("nan"))
