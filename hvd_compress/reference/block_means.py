"""Operators on blocks' means. All tensors but ``invalid`` are float32, (blocks,)."""

import torch
from torch import Tensor

from .blocks import usable


def block_means_send(
    fresh: Tensor, unsent: Tensor, velocity: Tensor | None, out: Tensor, invalid: Tensor, momentum: float
) -> None:
    """Add the new block means ``fresh`` to ``unsent``, the means not sent yet, and copy the sum to ``out``::

        velocity <- momentum * velocity + fresh      (only with a velocity; otherwise velocity stands for fresh)
        unsent   <- unsent + velocity
        out      <- unsent
        fresh    <- 0

    A block whose ``fresh`` is not :func:`~hvd_compress.reference.usable` keeps ``unsent`` and ``velocity``, and sets
    ``invalid``, int32, (1,), to 1.
    """
    fits = usable(fresh)
    step = fresh if velocity is None else velocity * momentum + fresh
    unsent.copy_(torch.where(fits, unsent + step, unsent))
    if velocity is not None:
        velocity.copy_(torch.where(fits, step, velocity))
    invalid |= (~fits.all()).to(torch.int32)
    out.copy_(unsent)
    fresh.zero_()


def block_means_keep(mean: Tensor, quantization_error: Tensor, unsent: Tensor) -> None:
    """Called after averaging: where the average ``mean`` is finite, ``unsent`` becomes ``quantization_error``."""
    unsent.copy_(torch.where(mean.isfinite(), quantization_error, unsent))
