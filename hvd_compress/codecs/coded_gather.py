"""Codes in an allgather: every rank receives the codes of all ranks and averages them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..engine.collectives import allgather
from ..reference.scales import bounded
from .base import Averaged, Channel, Codec, invalidate
from .packed import Code
from .scales import Moments


@dataclass(frozen=True)
class CodedGather(Codec):
    """An allgather of codes with each rank's own scales. Values are encoded only once, but the bytes grow with N."""

    code: Code

    @property
    def name(self) -> str:
        return f"{self.code.name}-gather"

    def channel(self, groups: int, ranks: int, rank: int, device: torch.device) -> "GatherChannel":
        return GatherChannel(self.code, groups, ranks, rank, device)


def floats(message: Tensor) -> Tensor:
    """The float32 in these bytes as float64, flat. Copies the bytes, which may be unaligned."""
    return message.flatten().clone().view(torch.float32).double()


class GatherChannel(Channel):
    """A message is a header and codes. The header has one float32 per group: the sender's scale, negative for a
    Laplacian, NaN if the sender is invalid. Ranks that send different entries call :meth:`encode` and
    :meth:`decode_rank` instead of :meth:`average`."""

    def __init__(self, code: Code, groups: int, ranks: int, rank: int, device: torch.device) -> None:
        super().__init__(groups, ranks, rank, device)
        self.code = code
        self.head = 4 * groups

    def set_group_sizes(self, sizes: list[int]) -> None:
        super().set_group_sizes(sizes)
        size = self.head + self.code.size(self.count)
        self.message = torch.zeros(size, dtype=torch.uint8, device=self.device)

    def encode(self, values: Tensor, invalid: Tensor) -> Tensor:
        """This rank's message, uint8; sets ``quantization_error``."""
        scale, kind = self.code.fitted(Moments(values, self.edges))
        scale = scale.float()  # as in the message
        codes = self.message[self.head :]
        self.code.encode(values, scale.double(), kind, self.edges, codes, self.quantization_error)
        header = torch.where(kind > 0, -scale, scale).masked_fill(invalid != 0, float("nan"))
        self.message[: self.head] = header.view(torch.uint8)
        return self.message

    def decode_rank(self, gathered: Tensor, rank: int, into: Tensor, add: bool) -> None:
        """Decodes the values of one rank, from the gathered messages, and writes them to ``into``, or adds them."""
        row = gathered.view(self.ranks, -1)[rank]
        scale = floats(row[: self.head])
        self.code.decode(row[self.head :], bounded(scale.abs()), (scale < 0).long(), self.edges, into, add)

    def any_invalid(self, gathered: Tensor) -> Tensor:
        """Whether a message is from an invalid rank: bool, ()."""
        return floats(gathered.view(self.ranks, -1)[:, : self.head]).isnan().any()

    def average(self, values: Tensor, invalid: Tensor, key: int) -> Averaged:
        gathered = yield allgather(self.encode(values, invalid), "values")
        for rank in range(self.ranks):
            self.decode_rank(gathered, rank, self.mean, add=rank > 0)
        self.mean *= 1.0 / self.ranks
        invalidate(self.mean, self.any_invalid(gathered))
        return self.mean, self.quantization_error
