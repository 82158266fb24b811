"""Codecs whose codes cannot be summed: ranks decode and average them, with an alltoall or an allgather."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from ..engine.collectives import allgather, alltoall
from ..reference.scales import bounded
from .base import Averaged, Channel, Codec, Messages, invalidate
from .packed import Code
from .scales import Moments, Scales


@dataclass(frozen=True)
class CodedRing(Codec):
    """A reduce-scatter and an allgather of codes, as in CGX (Markov et al., 2022).

    Every rank receives all ranks' codes of its part of the values (alltoall), averages them, and sends the encoded
    average to all (allgather). The error of the second encoding is added to this rank's residual. Each collective has
    ``bits / 8`` bytes per value; 8 bytes per group update the scales for the next step.
    """

    code: Code

    @property
    def name(self) -> str:
        return self.code.name

    def channel(self, groups: int, ranks: int, rank: int, device: torch.device) -> Channel:
        return _RingChannel(self.code, groups, ranks, rank, device)

    def messages(self, sizes: Sequence[int], ranks: int) -> Messages:
        part = self.code.size(-(-sum(sizes) // (8 * ranks)) * 8)
        return [("alltoall", ranks * part), ("allgather", 8 * len(sizes) + part)]


@dataclass(frozen=True)
class CodedGather(Codec):
    """An allgather of codes with each rank's own scales. Values are encoded only once, but the bytes grow with N."""

    code: Code

    @property
    def name(self) -> str:
        return f"{self.code.name}-gather"

    def channel(self, groups: int, ranks: int, rank: int, device: torch.device) -> "GatherChannel":
        return GatherChannel(self.code, groups, ranks, rank, device)

    def messages(self, sizes: Sequence[int], ranks: int) -> Messages:
        return [("allgather", 4 * len(sizes) + self.code.size(sum(sizes)))]


class _RingChannel(Channel):
    """The allgather's message is a header and codes. The header has two float32 per group: the scale of the sender's
    values, or NaN if it is invalid; and the sum of squares or the largest magnitude of its part of the average."""

    scales: Scales

    def __init__(self, code: Code, groups: int, ranks: int, rank: int, device: torch.device) -> None:
        super().__init__(groups, ranks, rank, device)
        self.code = code
        self.scales = Scales(groups, device, code.peak)
        self.head = 8 * groups

    def set_group_sizes(self, sizes: list[int]) -> None:
        super().set_group_sizes(sizes)
        # Parts are multiples of eight values, so that their codes are whole bytes.
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
        code.encode(values, self.scales.sent, kind, edges, self.codes[:everything], self.quantization_error)
        theirs = yield alltoall(self.codes)
        part = torch.zeros(self.end - self.begin, dtype=torch.float32, device=self.device)
        for row in theirs.view(self.ranks, -1):
            code.decode(row[:own], self.scales.sent, kind, self.own_edges, part, add=True)
        part *= 1.0 / self.ranks
        error = torch.empty_like(part)
        code.encode(part, self.scales.mean, kind, self.own_edges, self.reply[self.head :][:own], error)
        # An error in the average is an error of ``ranks`` times as much in the sum.
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
            # One by one: the order of sum() may differ between machines.
            total = reduce(torch.add, parts.unbind(0))
            mean = (total / decoded.count.clamp(min=1)).sqrt()
        self.scales.update(local.nan_to_num(nan=0.0).amax(0), mean, decoded)
        invalidate(self.mean, bad)


def floats(message: Tensor) -> Tensor:
    """The float32 in these bytes as float64, flat. Copies the bytes, because they may be unaligned."""
    return message.flatten().clone().view(torch.float32).double()


class GatherChannel(Channel):
    """A message is a header and codes. The header has one float32 per group: the sender's scale, negative for a
    Laplacian, NaN if the sender is invalid. :meth:`encode` and :meth:`decode_rank` are also used without
    :meth:`average`, when ranks send values of different entries."""

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
        moments = Moments(values, self.edges)
        # Rounded to float32, as in the message.
        scale = bounded(moments.scale(self.code.peak)).float()
        codes = self.message[self.head :]
        self.code.encode(values, scale.double(), moments.kind, self.edges, codes, self.quantization_error)
        header = torch.where(moments.kind > 0, -scale, scale).masked_fill(invalid != 0, float("nan"))
        self.message[: self.head] = header.view(torch.uint8)
        return self.message

    def decode_rank(self, gathered: Tensor, rank: int, into: Tensor, add: bool) -> None:
        """Write, or ``add``, the values of one rank, from the gathered messages of all."""
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
