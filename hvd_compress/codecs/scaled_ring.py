"""A coded ring for all entries of a bucket: every message carries the scales of its own short runs of values."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..engine.collectives import allgather, alltoall
from ..reference.scales import bounded
from .base import Averaged, Channel, Codec
from .packed import Lloyd
from .scales import Moments


@dataclass(frozen=True)
class ScaledRing(Codec):
    """A reduce-scatter and an allgather of Lloyd-Max codes, with the sender's scale of every run.

    Every rank receives all ranks' codes of its part of the values (alltoall), averages them, and sends the encoded
    average to all (allgather). The error of the second encoding is added to this rank's residual. Nothing is kept from
    step to step. Each collective has ``bits / 8`` bytes a value and 2 bytes a run.

    Args:
        bits: per value, 1 to 8.
        run: values that share a scale, at least 8; a parameter's last run and those at a part's ends may be shorter.
    """

    bits: int
    run: int

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise ValueError(f"bits must lie in 1 to 8, got {self.bits}")
        if self.run < 8:
            raise ValueError(f"run must be at least 8, got {self.run}")

    @property
    def name(self) -> str:
        return f"{self.bits} bits, a scale for {self.run} values"

    def channel(self, groups: int, ranks: int, rank: int, device: torch.device) -> Channel:
        return _ScaledRingChannel(self, groups, ranks, rank, device)


class _Scales:
    """Root mean squares and kinds of distribution of runs, as they are sent: bfloat16, negative for a Laplacian, NaN if
    the sender is invalid."""

    def __init__(self, sent: Tensor) -> None:
        self.sent = sent
        self.scale, self.kind = bounded(sent.float().abs()), (sent < 0).long()

    @classmethod
    def of(cls, values: Tensor, edges: Tensor) -> "_Scales":
        moments = Moments(values, edges)
        scale = bounded(moments.rms)
        return cls(torch.where(moments.kind > 0, -scale, scale).bfloat16())


class _ScaledRingChannel(Channel):
    """The part of a message for one rank, and of the allgather's from one rank, is a header and codes. The header has a
    scale for each run; where another part has more runs, it is padded."""

    def __init__(self, codec: ScaledRing, groups: int, ranks: int, rank: int, device: torch.device) -> None:
        super().__init__(groups, ranks, rank, device)
        self.code, self.run = Lloyd(codec.bits), codec.run

    def set_group_sizes(self, sizes: list[int]) -> None:
        super().set_group_sizes(sizes)
        # Parts are multiples of eight values, so that their codes are whole bytes.
        part = max(8, -(-self.count // (8 * self.ranks)) * 8)
        ends = [min(i * part, self.count) for i in range(self.ranks + 1)]
        self.begin, self.end = ends[self.rank : self.rank + 2]
        starts = [torch.arange(a, b, self.run, device="cpu") for a, b in pairwise(self.edges.tolist())]
        runs = torch.cat([*starts, torch.tensor(ends, device="cpu")]).unique()
        #: The first run of each part, and the number of all runs.
        first = torch.searchsorted(runs, torch.tensor(ends, device="cpu"))
        counts, own = first.diff(), slice(int(first[self.rank]), int(first[self.rank + 1]) + 1)
        self.columns = max(1, int(counts.max()))
        rows = torch.arange(self.ranks, device="cpu").repeat_interleave(counts)
        place = torch.arange(len(runs) - 1, device="cpu") - first[rows] + rows * self.columns
        self.runs, self.own_runs = runs.to(self.device), (runs[own] - self.begin).to(self.device)
        #: Where each run's scale is in the headers of all parts.
        self.place = place.to(self.device)
        self.head = 2 * self.columns
        self.codes = torch.zeros(self.ranks, self.code.size(part), dtype=torch.uint8, device=self.device)
        self.message = torch.zeros(self.ranks, self.head + self.code.size(part), dtype=torch.uint8, device=self.device)
        self.reply = torch.zeros_like(self.message[0])

    def average(self, values: Tensor, invalid: Tensor, key: int) -> Averaged:
        code, everything, own = self.code, self.code.size(self.count), self.code.size(self.end - self.begin)
        scales, codes = _Scales.of(values, self.runs), self.codes.view(-1)[:everything]
        code.encode(values, scales.scale, scales.kind, self.runs, codes, self.quantization_error)
        self.message[:, : self.head] = self._header(scales.sent, self.place, self.ranks, invalid != 0)
        self.message[:, self.head :] = self.codes
        theirs = (yield alltoall(self.message.view(-1))).view(self.ranks, -1)

        part = torch.zeros(self.end - self.begin, dtype=torch.float32, device=self.device)
        received = self._sent(theirs)
        for sent, row in zip(received, theirs, strict=True):
            scales = _Scales(sent[: len(self.own_runs) - 1])
            code.decode(row[self.head :][:own], scales.scale, scales.kind, self.own_runs, part, add=True)
        part *= 1.0 / self.ranks
        scales, error = _Scales.of(part, self.own_runs), torch.empty_like(part)
        code.encode(part, scales.scale, scales.kind, self.own_runs, self.reply[self.head :][:own], error)
        # An error in the average is an error of ``ranks`` times as much in the sum.
        self.quantization_error[self.begin : self.end].add_(error, alpha=self.ranks)
        slots = torch.arange(len(scales.sent), device=self.device)
        self.reply[: self.head] = self._header(scales.sent, slots, 1, received.isnan().any())[0]

        rows = (yield allgather(self.reply, "values")).view(self.ranks, -1)
        received = self._sent(rows)
        scales = _Scales(received.view(-1)[self.place])
        codes = rows[:, self.head :].reshape(-1)[:everything]
        code.decode(codes, scales.scale, scales.kind, self.runs, self.mean, add=False)
        self.mean.masked_fill_(received.isnan().any(), float("nan"))
        return self.mean, self.quantization_error

    def _header(self, sent: Tensor, place: Tensor, rows: int, invalid: Tensor) -> Tensor:
        """Scales at their places: uint8, (rows, bytes)."""
        header = torch.zeros(rows * self.columns, dtype=torch.bfloat16, device=self.device)
        header[place] = sent
        return header.masked_fill_(invalid, float("nan")).view(rows, -1).view(torch.uint8)

    def _sent(self, rows: Tensor) -> Tensor:
        """The scales in the headers: bfloat16, (ranks, columns)."""
        return rows[:, : self.head].clone(memory_format=torch.contiguous_format).view(torch.bfloat16)
