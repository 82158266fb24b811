"""Blocks' means on their way: see :mod:`hvd_compress.means`. All are float32, (blocks,)."""

import torch
from torch import Tensor


def means_send(
    fresh: Tensor, held: Tensor, velocity: Tensor | None, out: Tensor, invalid: Tensor, momentum: float
) -> None:
    """What gradients have brought joins what is held, and goes out::

        velocity <- momentum * velocity + fresh      (only with a velocity; else velocity stands for fresh)
        held     <- held + velocity
        out      <- held
        fresh    <- 0

    A block whose new ``held`` would not be finite keeps its held and velocity, and sets ``invalid``, int32, (1,), to 1.
    """
    step = fresh if velocity is None else velocity * momentum + fresh
    total = held + step
    finite = total.isfinite()
    held.copy_(torch.where(finite, total, held))
    if velocity is not None:
        velocity.copy_(torch.where(finite, step, velocity))
    invalid |= (~finite.all()).to(torch.int32)
    out.copy_(held)
    fresh.zero_()


def means_keep(mean: Tensor, lost: Tensor, held: Tensor) -> None:
    """The averages are there: ``held`` becomes what they ``lost``, where they are finite."""
    held.copy_(torch.where(mean.isfinite(), lost, held))
