"""QSGD's quantization (Alistarh et al., NeurIPS 2017)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .. import ops
from ..engine.arguments import check_integer
from ..engine.collectives import allgather
from ..reference.scales import bounded, divided
from .base import Averaged, Channel, Codec, Messages, invalidate
from .coded_gather import floats
from .scales import Moments


@dataclass(frozen=True)
class Levels(Codec):
    """Values stochastically rounded to multiples of ``norm / (2**(bits - 1) - 1)``, in an allgather.

    Args:
        bits: bits per value, 2 to 8, sign included. The paper's Elias code is shorter if most values are 0.
        run: entries that share a norm (the paper's "bucket"); the last run of a parameter may be shorter.
    """

    bits: int
    run: int = 512

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", check_integer("bits", self.bits, 2, 8))
        object.__setattr__(self, "run", check_integer("run", self.run, 1))

    @property
    def name(self) -> str:
        return f"{self.bits} bits, a norm for {self.run} values"

    def channel(self, groups: int, ranks: int, rank: int, device: torch.device) -> Channel:
        return _LevelsChannel(self, groups, ranks, rank, device)

    def messages(self, sizes: Sequence[int], ranks: int) -> Messages:
        runs, words = sum(-(-size // self.run) for size in sizes), -(-sum(sizes) // (64 // self.bits))
        return [("allgather", 4 * runs + 8 * words)]


class _LevelsChannel(Channel):
    """A message is the norm of each run, float32 (NaN if the rank is invalid), and the values in lanes."""

    def __init__(self, codec: Levels, groups: int, ranks: int, rank: int, device: torch.device) -> None:
        super().__init__(groups, ranks, rank, device)
        self.codec = codec

    def set_group_sizes(self, sizes: list[int]) -> None:
        super().set_group_sizes(sizes)
        ends = self.edges.tolist()
        runs = [first for a, b in pairwise(ends) for first in range(a, b, self.codec.run)]
        self.runs = torch.tensor([*runs, self.count], dtype=torch.int64, device=self.device)
        self.head = 4 * (len(self.runs) - 1)
        self.words = torch.zeros(-(-self.count // (64 // self.codec.bits)), dtype=torch.int64, device=self.device)
        self.theirs = torch.empty(self.count, dtype=torch.float32, device=self.device)

    def average(self, values: Tensor, invalid: Tensor, key: int) -> Averaged:
        bits = self.codec.bits
        norm = bounded(Moments(values, self.runs).square.sqrt()).float()
        ops.lanes_encode(values, self._step(norm), self.runs, self.words, self.quantization_error, bits, bits, key)
        header = norm.masked_fill(invalid != 0, float("nan"))
        gathered = yield allgather(torch.cat([header.view(torch.uint8), self.words.view(torch.uint8)]), "values")
        rows = gathered.view(self.ranks, -1)
        self.mean.zero_()
        for row in rows:
            step = self._step(bounded(floats(row[: self.head])).float())
            words = row[self.head :].clone().view(torch.int64)
            ops.lanes_decode(words, step, self.runs, self.theirs, bits, 1.0 / self.ranks)
            self.mean += self.theirs
        invalidate(self.mean, floats(rows[:, : self.head]).isnan().any())
        return self.mean, self.quantization_error

    def _step(self, norm: Tensor) -> Tensor:
        return divided(norm, 2 ** (self.codec.bits - 1) - 1)
