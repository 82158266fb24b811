"""Checks by one allreduce that a number is the same on all ranks."""

from collections.abc import Generator, Iterable

import torch
from torch import Tensor

from .collectives import Request, allreduce
from .dense import as_real

#: Numbers to compare must be below this, so that sums of their squares are exact in float64.
LIMIT = 2**20
# Entries that are hashed at a time.
_PART = 2**20


def all_equal(numbers: Tensor, name: str = "step") -> Generator[Request, Tensor, Tensor]:
    """An exchange that returns, for each of ``numbers`` (integers in [0, LIMIT), (n,)), whether it is the same on all
    ranks: bool, (n,). Numbers are equal if and only if the mean of their squares is the square of their mean."""
    x = numbers.double()
    sums = yield allreduce(torch.stack([torch.ones_like(x), x, x * x]), "budget", name)
    count, total, squares = sums.unbind()
    return torch.eq(count * squares, total * total)


def disagreement() -> RuntimeError:
    """The error to raise when ranks differ in seed, step or options."""
    return RuntimeError(
        "the ranks' compressors disagree: seed, density, all other options and step must be the same on all ranks "
        "(was a state loaded on some ranks only? was the seed derived from the rank? were the parameters broadcast?)"
    )


def hash_of(tensors: Iterable[Tensor]) -> int:
    """A hash of tensors: equal for equal bits. Synchronises a GPU."""
    total = 0
    for tensor in tensors:
        flat = as_real(tensor.detach()).flatten()
        bits = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
        for number, part in enumerate(torch.split(bits, _PART), 1):
            place = torch.arange(part.numel(), dtype=torch.int64, device=part.device) % 8191 + number
            total = (total * 31 + int((part.long() * place).sum())) % 2**61
    return total
