"""A coded ring without memory for values: averages and what was sent stay in codes until they are applied."""

from collections.abc import Generator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from .. import ops
from ..engine.collectives import Request
from .codebooks import codebook_on
from .coded_ring import RingChannel, unsigned


@dataclass
class Coded:
    """Values in codes of a codebook, with scales and kinds of runs: float32 and int64, (runs,). ``factor``: of the
    values, float32, (), or None."""

    bits: int
    codes: Tensor
    scale: Tensor
    edges: Tensor
    kind: Tensor
    factor: Tensor | None = None

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The first arguments of the operators."""
        return self.codes, self.scale, self.edges, codebook_on(self.bits, self.scale.device), self.kind

    def times(self, factor: Tensor) -> None:
        """Sets the factor."""
        self.factor = factor

    def write(self, values: Tensor) -> Tensor:
        """Writes the values, float32, flat."""
        ops.codebook_decode(*self.tables, values, self.bits, False)
        return values if self.factor is None else values.mul_(self.factor)

    def subtract_from(self, values: Tensor) -> None:
        """Subtracts the values, without the factor."""
        codes, scale, edges, book, kind = self.tables
        ops.codebook_decode(codes, -scale, edges, book, kind, values, self.bits, True)

    def square(self, count: int) -> Tensor:
        """The sum of squares of the ``count`` values, without the factor: float64, ()."""
        out = torch.empty(1, 3, dtype=torch.float64, device=self.scale.device)
        ops.codebook_moments(*self.tables, out, count, self.bits)
        return out[0, 0]

    def move(
        self, common: Tensor, velocity: Tensor | None, own: Tensor, before: Tensor | None, lr: float, momentum: float
    ) -> None:
        """Moves weights by the values: :func:`hvd_compress.reference.codebook_move`."""
        ops.codebook_move(*self.tables, self.factor, common, velocity, own, before, lr, momentum, self.bits)


class GroupedChannel(RingChannel):
    """A channel of codes of a codebook, that can tell the values of a group from those of all."""

    def set_group_sizes(self, sizes: list[int]) -> None:
        super().set_group_sizes(sizes)
        del self.mean, self.quantization_error
        self.edges = self.runs  # of the values that share a scale
        # By group: its first value, its runs, and their edges in it.
        self.starts, runs = [*accumulate(sizes, initial=0)], self.runs.cpu()
        places = torch.tensor([*self.starts, self.begin, self.end], dtype=torch.int64, device="cpu")
        *first, begin, end = torch.searchsorted(runs, places).tolist()
        self.runs_of = [slice(a, b) for a, b in pairwise(first)]
        self._edges = [(runs[a : b + 1] - runs[a]).to(self.device) for a, b in pairwise(first)]
        self._own = slice(begin, end)

    def of_group(self, coded: Coded, group: int, count: int) -> Coded:
        """The first values of a group."""
        codes, runs = coded.codes[self.starts[group] // 8 * coded.bits :], self.runs_of[group]
        edges = self._edges[group].clamp(max=count)
        return Coded(coded.bits, codes[: -(-count // 8) * coded.bits], coded.scale[runs], edges, coded.kind[runs])

    def averages(
        self, values: Tensor, invalid: Tensor, table: Tensor
    ) -> Generator[Request, Tensor, tuple[Coded, Coded, Tensor, Tensor]]:
        """As :meth:`average`, given the moments of the runs. Returns the averages, NaN if they are invalid; what this
        rank sent, 0 in its own part and if they are invalid; the errors of the averages in that part; and whether they
        are invalid: bool, ()."""
        error = torch.empty(self.end - self.begin, dtype=torch.float32, device=self.device)
        codes, scales, wrong, sent = yield from self.exchange(values, invalid, table, None, error)
        scale, kind = unsigned(scales)
        means = Coded(self.mean_code.bits, codes, scale.masked_fill(wrong, float("nan")), self.runs, kind)
        mine = Coded(self.code.bits, sent[0], sent[1].float().masked_fill(wrong, 0.0), self.runs, sent[2])
        mine.scale[self._own] = 0.0
        return means, mine, error, wrong
