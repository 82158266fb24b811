"""The coded ring: codes that cannot be summed, in a reduce-scatter and an allgather."""

from collections.abc import Generator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ..engine.arguments import check_integer
from ..engine.collectives import Request, allgather, alltoall
from ..reference.scales import bounded
from .base import Averaged, Channel, Codec, invalidate
from .packed import Code
from .scales import Moments


@dataclass(frozen=True)
class CodedRing(Codec):
    """A reduce-scatter and an allgather of codes, as in CGX (Markov et al., 2022), with the sender's scales.

    1. Every rank encodes its values and sends each part of them to the rank that owns the part (alltoall).
    2. The owner decodes the codes of the other ranks and averages them with its own values, which are not rounded.
    3. It encodes the average and sends it to all (allgather); N times the error of this encoding is its own
       quantization error in its part.

    Nothing is kept from step to step. Both messages have 2 bytes a run, for its scale.

    Args:
        code: how a value is encoded.
        run: values that share a scale, at least 8. The last run of a parameter may be shorter, and the first and last
            of a rank's part.
        mean_code: how an average is encoded; None: as a value.
    """

    code: Code
    run: int = 512
    mean_code: Code | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "run", check_integer("run", self.run, 8))
        if self.mean_code == self.code:
            object.__setattr__(self, "mean_code", None)

    @property
    def name(self) -> str:
        mean = f", averages in {self.mean_code.name}" if self.mean_code else ""
        return self.code.name + mean + (f", a scale for {self.run} values" if self.run != 512 else "")

    def channel(self, groups: int, ranks: int, rank: int, device: torch.device) -> Channel:
        return RingChannel(self, groups, ranks, rank, device)


class RingChannel(Channel):
    """The message to one rank, and from one rank in the allgather::

        | a scale for each run of the part, bfloat16 | padding to ``columns`` scales | codes |

    ``columns``: the largest number of runs in a part. A scale is negative for a run that looks Laplacian, and NaN if
    the sender is invalid.
    """

    def __init__(self, codec: CodedRing, groups: int, ranks: int, rank: int, device: torch.device) -> None:
        super().__init__(groups, ranks, rank, device)
        self.run, self.code, self.mean_code = codec.run, codec.code, codec.mean_code or codec.code
        #: The requests of the next average, once they are known to others.
        self._asked: tuple[Request, Request] | None = None

    def set_group_sizes(self, sizes: list[int]) -> None:
        super().set_group_sizes(sizes)
        self._asked = None
        # A part for each rank; the last ones may be shorter. A multiple of eight values: its codes are whole bytes.
        part = max(8, -(-self.count // (8 * self.ranks)) * 8)
        # The edges of the parts, (ranks + 1,), and of the runs, each within a group and a part: int64, on the CPU.
        ends = torch.arange(self.ranks + 1, dtype=torch.int64, device="cpu").mul_(part).clamp_(max=self.count)
        edges = pairwise(accumulate(sizes, initial=0))
        starts = [torch.arange(a, b, self.run, dtype=torch.int64, device="cpu") for a, b in edges]
        runs = torch.unique_consecutive(torch.cat([*starts, ends]).sort().values)
        # The first run of each part, and the number of all runs: (ranks + 1,).
        first = torch.searchsorted(runs, ends)
        self.columns = max(1, int(first.diff().max()))
        # The places of runs in a flat table of (ranks, columns).
        used = torch.arange(self.columns, dtype=torch.int64, device="cpu") < first.diff()[:, None]
        self.place = used.flatten().nonzero().flatten().to(self.device)
        self.begin, self.end = ends[self.rank : self.rank + 2].tolist()
        own = runs[int(first[self.rank]) : int(first[self.rank + 1]) + 1] - self.begin
        self.runs, self.own_runs = runs.to(self.device), own.to(self.device)
        self.head, self.part = 2 * self.columns, part

    def first_requests(self) -> tuple[Request, ...]:
        self._asked = self._ask()
        return self._asked[:1]

    def _ask(self) -> tuple[Request, Request]:
        size = self.ranks * (self.head + self.code.size(self.part))
        message = torch.empty(size, dtype=torch.uint8, device=self.device)
        reply = torch.zeros(self.head + self.mean_code.size(self.part), dtype=torch.uint8, device=self.device)
        answer = allgather(reply, "values")
        return alltoall(message, answer), answer

    def average(self, values: Tensor, invalid: Tensor, key: int) -> Averaged:
        error = self.quantization_error
        codes, scales, wrong, _ = yield from self.exchange(values, invalid, None, error, error[self.begin : self.end])
        error[self.begin : self.end].mul_(self.ranks)  # in the sum it is as many times as large
        self.mean_code.decode(codes, *unsigned(scales), self.runs, self.mean, add=False)
        invalidate(self.mean, wrong)
        return self.mean, error

    def exchange(
        self, values: Tensor, invalid: Tensor, table: Tensor | None, error: Tensor | None, mean_error: Tensor
    ) -> Generator[Request, Tensor, tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]]:
        """As :meth:`average`. Returns the average's codes, the scales of its runs, whether it is invalid, and this
        rank's codes, scales and kinds.

        ``table``: of moments of the runs, if it is written. ``error``: to write the values' errors to, or None for a
        code that can do without and may write errors in place. ``mean_error``: for those of the average in this rank's
        part.
        """
        (sent, answer), self._asked = self._asked or self._ask(), None
        message, reply = sent.tensor.view(self.ranks, -1), answer.tensor
        rows = message[:, self.head :]
        codes = torch.zeros_like(rows, memory_format=torch.contiguous_format)
        flat = codes.view(-1)[: self.code.size(self.count)]
        mine = self._encode(self.code, values, Moments(values, self.runs, table), self.runs, flat, error)
        rows.copy_(codes)
        header = torch.zeros(self.ranks * self.columns, dtype=torch.bfloat16, device=self.device)
        header[self.place] = _signed(*mine)
        header.masked_fill_(invalid != 0, float("nan"))
        message[:, : self.head] = header.view(torch.uint8).view(self.ranks, -1)
        del message, rows, codes
        theirs = (yield sent).view(self.ranks, -1)
        del sent

        own, received = values[self.begin : self.end], self._scales(theirs)
        part, scales = mean_error if error is None else torch.empty_like(own), received[:, : len(self.own_runs) - 1]
        moments = self.code.mean(theirs, self.head, *unsigned(scales), self.own_runs, own, self.rank, part)
        codes = reply[self.head :][: self.mean_code.size(len(part))]
        scales = _signed(*self._encode(self.mean_code, part, moments, self.own_runs, codes, mean_error))
        header = torch.zeros(self.columns, dtype=torch.bfloat16, device=self.device)
        header[: len(scales)] = scales
        reply[: self.head] = header.masked_fill_(received.isnan().any(), float("nan")).view(torch.uint8)
        del theirs, received

        rows = (yield answer).view(self.ranks, -1)
        received, codes = self._scales(rows), rows[:, self.head :].reshape(-1)[: self.mean_code.size(self.count)]
        return codes, received.view(-1)[self.place], received.isnan().any(), (flat, *mine)

    def _encode(
        self, code: Code, values: Tensor, moments: Moments, runs: Tensor, codes: Tensor, error: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Writes codes and errors; returns the scales as they are sent, without sign, and kinds."""
        scale, kind = code.fitted(moments)
        # bfloat16 has 8 bits: if it rounded down, the largest magnitude of a run would be clipped.
        scale = (scale * (1.0 + 2.0**-8) if code.peak else scale).bfloat16()
        code.encode(values, scale.float(), kind, runs, codes, error)  # type: ignore[arg-type]
        return scale, kind

    def _scales(self, rows: Tensor) -> Tensor:
        """The scales in the headers of all rows: bfloat16, (ranks, columns)."""
        return rows[:, : self.head].clone(memory_format=torch.contiguous_format).view(torch.bfloat16)


def _signed(scale: Tensor, kind: Tensor) -> Tensor:
    """Scales as they are sent, bfloat16."""
    return torch.where(kind > 0, -scale, scale)


def unsigned(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Scales, float32, and kinds, int64, of scales that were received."""
    return bounded(scales.float().abs()), (scales < 0).long()
