"""Hashes of tensors."""

from collections.abc import Iterable

import torch
from torch import Tensor

from .dense import as_real

# The entries that are hashed at a time.
_PART = 2**20


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
