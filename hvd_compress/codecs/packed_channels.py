"""Codes that Horovod cannot add: averaged by their owners (the coded ring), or by everybody (the coded gather)."""

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from ..engine.collectives import allgather, alltoall
from ..reference.scales import bounded
from .base import Averaged, Channel, Codec
from .packed import Code
from .scales import Moments, ScaledChannel, Scales


@dataclass(frozen=True)
class CodedRing(Codec):
    """Every rank owns a part of the slots: it gets all ranks' codes for it, averages them, and sends the average to
    all, coded again. What the second coding loses, the owner keeps in its residual.

    Two collectives of ``bits / 8`` bytes a value each (alltoall, allgather), as in CGX (Markov et al., 2022), and 8
    bytes a group for the scales that count from the next step on.
    """

    code: Code

    @property
    def name(self) -> str:
        return self.code.name

    def channel(self, groups: int, ranks: int, rank: int, device: torch.device) -> Channel:
        return _RingChannel(self.code, groups, ranks, rank, device)


@dataclass(frozen=True)
class CodedGather(Codec):
    """Every rank sends its codes to all others, with its own scales: exact, but the bytes grow with the ranks."""

    code: Code

    @property
    def name(self) -> str:
        return f"{self.code.name}-gather"

    def channel(self, groups: int, ranks: int, rank: int, device: torch.device) -> "GatherChannel":
        return GatherChannel(self.code, groups, ranks, rank, device)


class _RingChannel(ScaledChannel):
    """A reply is a header and an owner's codes. The header has two float32 a group: the sender's own scale, or NaN if
    it is invalid; and of its part of the average, before it was coded, the sum of squares or the largest magnitude."""

    def __init__(self, code: Code, groups: int, ranks: int, rank: int, device: torch.device) -> None:
        super().__init__(groups, ranks, rank, device)
        self.code = code
        self.scales = Scales(groups, device, code.peak)
        self.head = 8 * groups

    def set_group_sizes(self, sizes: list[int]) -> None:
        super().set_group_sizes(sizes)
        # Whole bytes for everybody: the parts are multiples of eight values.
        part = -(-self.count // (8 * self.ranks)) * 8
        self.begin = min(self.rank * part, self.count)
        self.end = min(self.begin + part, self.count)
        self.own_edges = (self.edges - self.begin).clamp(0, self.end - self.begin)
        self.codes = torch.zeros(self.ranks * self.code.size(part), dtype=torch.uint8, device=self.device)
        self.reply = torch.zeros(self.head + self.code.size(part), dtype=torch.uint8, device=self.device)

    def average(self, values: Tensor, invalid: Tensor, key: int) -> Averaged:
        moments = Moments(values, self.edges)
        if not self.scales.known:
            yield from self.scales.first(moments, self.ranks)
        code, edges, kind = self.code, self.edges, self.scales.kind
        everything, own = code.size(self.count), code.size(self.end - self.begin)
        code.encode(values, self.scales.local, kind, edges, self.codes[:everything], self.quantization_error)
        theirs = yield alltoall(self.codes)
        part = torch.zeros(self.end - self.begin, device=self.device)
        for row in theirs.view(self.ranks, -1):
            code.decode(row[:own], self.scales.local, kind, self.own_edges, part, add=True)
        part *= 1.0 / self.ranks
        error = torch.empty_like(part)
        code.encode(part, self.scales.mean, kind, self.own_edges, self.reply[self.head :][:own], error)
        # An average that is off by e leaves a sum that is off by ranks * e: it is the owner's to say next time.
        self.quantization_error[self.begin : self.end].add_(error, alpha=self.ranks)
        self._head(moments, Moments(part, self.own_edges), invalid)
        rows = (yield allgather(self.reply, "values")).view(self.ranks, -1)
        codes = rows[:, self.head :].flatten()[:everything].contiguous()
        code.decode(codes, self.scales.mean, kind, edges, self.mean, add=False)
        self._follow(rows)
        return self.mean, self.quantization_error

    def _head(self, moments: Moments, part: Moments, invalid: Tensor) -> None:
        own = moments.scale(self.code.peak).masked_fill(invalid != 0, float("nan"))
        header = torch.cat([own, part.peak if self.code.peak else part.square])
        self.reply[: self.head] = header.float().view(torch.uint8)

    def _follow(self, rows: Tensor) -> None:
        local, parts = floats(rows[:, : self.head]).view(self.ranks, 2, -1).unbind(1)
        bad = local.isnan().any()
        decoded = Moments(self.mean, self.edges)
        if self.code.peak:
            mean = parts.amax(0)
        else:
            # One by one: a sum over ranks may add in another order on another processor.
            total = reduce(torch.add, parts.unbind(0))
            mean = (total / decoded.count.clamp(min=1)).sqrt()
        self.scales.update(local.nan_to_num(nan=0.0).amax(0), mean, decoded)
        self.mean.masked_fill_(bad, float("nan"))


def floats(message: Tensor) -> Tensor:
    """Bytes as the float32 they are, in float64, flat. A copy: headers may begin anywhere, floats may not."""
    return message.flatten().clone().view(torch.float32).double()


class GatherChannel(Channel):
    """A message is a header of one float32 a group, the sender's own scale, negative for a Laplacian, or NaN if it is
    invalid; and codes. Also of use by itself, for values that are not the same entries on every rank: :meth:`encode`,
    send, and :meth:`decode_rank`."""

    def __init__(self, code: Code, groups: int, ranks: int, rank: int, device: torch.device) -> None:
        super().__init__(groups, ranks, rank, device)
        self.code = code
        self.head = 4 * groups

    def set_group_sizes(self, sizes: list[int]) -> None:
        super().set_group_sizes(sizes)
        size = self.head + self.code.size(self.count)
        self.message = torch.zeros(size, dtype=torch.uint8, device=self.device)

    def encode(self, values: Tensor, invalid: Tensor) -> Tensor:
        """This rank's message; ``lost`` is what it does not carry."""
        moments = Moments(values, self.edges)
        # As the receivers will see it: rounded to float32.
        scale = bounded(moments.scale(self.code.peak)).float()
        self.code.encode(
            values, scale.double(), moments.kind, self.edges, self.message[self.head :], self.quantization_error
        )
        header = torch.where(moments.kind > 0, -scale, scale).masked_fill(invalid != 0, float("nan"))
        self.message[: self.head] = header.view(torch.uint8)
        return self.message

    def decode_rank(self, gathered: Tensor, rank: int, into: Tensor, add: bool) -> None:
        """A rank's values, of all ranks' messages."""
        row = gathered.view(self.ranks, -1)[rank]
        scale = floats(row[: self.head])
        self.code.decode(row[self.head :], bounded(scale.abs()), (scale < 0).long(), self.edges, into, add)

    def any_invalid(self, gathered: Tensor) -> Tensor:
        """Whether one of the messages is from an invalid rank: bool, ()."""
        return floats(gathered.view(self.ranks, -1)[:, : self.head]).isnan().any()

    def average(self, values: Tensor, invalid: Tensor, key: int) -> Averaged:
        gathered = yield allgather(self.encode(values, invalid), "values")
        for rank in range(self.ranks):
            self.decode_rank(gathered, rank, self.mean, add=rank > 0)
        self.mean *= 1.0 / self.ranks
        self.mean.masked_fill_(self.any_invalid(gathered), float("nan"))
        return self.mean, self.quantization_error
