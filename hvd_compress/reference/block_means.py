"""Blocks' means on their way: see :mod:`hvd_compress.means`. All are float32, (blocks,)."""

import torch
from torch import Tensor


def block_means_send(
    fresh: Tensor, unsent: Tensor, velocity: Tensor | None, out: Tensor, invalid: Tensor, momentum: float
) -> None:
    """What gradients have brought joins what is unsent, and goes out::

        velocity <- momentum * velocity + fresh      (only with a velocity; else velocity stands for fresh)
        unsent     <- unsent + velocity
        out      <- unsent
        fresh    <- 0

    A block whose new ``unsent`` would not be finite keeps its unsent and velocity, and sets ``invalid``, int32, (1,), to 1.
    """
    step = fresh if velocity is None else velocity * momentum + fresh
    total = unsent + step
    finite = total.isfinite()
    unsent.copy_(torch.where(finite, total, unsent))
    if velocity is not None:
        velocity.copy_(torch.where(finite, step, velocity))
    invalid |= (~finite.all()).to(torch.int32)
    out.copy_(unsent)
    fresh.zero_()


def block_means_keep(mean: Tensor, quantization_error: Tensor, unsent: Tensor) -> None:
    """The averages are there: ``unsent`` becomes what they ``quantization_error``, where they are finite."""
    unsent.copy_(torch.where(mean.isfinite(), quantization_error, unsent))
