"""Whether all ranks hold the same, from a sum: no rank has to see another's."""

from collections.abc import Generator

import torch
from torch import Tensor

from .collectives import Request, allreduce

#: Marks lie below this, so that sums of their squares are exact in float64.
MARKS = 2**20


def alike(marks: Tensor, name: str = "step") -> Generator[Request, Tensor, Tensor]:
    """An exchange that returns, for each mark, whether it is the same on all ranks: bool, (n,).

    ``marks``: whole numbers from 0 to ``MARKS - 1``, (n,). Numbers are equal just where the mean of the squares is the
    square of the mean.
    """
    mark = marks.double()
    sums = yield allreduce(torch.stack([torch.ones_like(mark), mark, mark * mark]), "budget", name)
    count, total, squares = sums.unbind()
    return torch.eq(count * squares, total * total)


def disagreement() -> RuntimeError:
    """What to raise where the ranks do not draw from the same seed and step."""
    return RuntimeError(
        "the ranks' compressors disagree: seed, density, all other options and step must be the same on all (was a "
        "state loaded on some ranks only? was the seed made from the rank? were the parameters broadcast?)"
    )
