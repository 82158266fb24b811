"""Integers that Horovod's own ring adds: several to a word, each in a lane that no carry leaves."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..collectives import allreduce
from .base import Averaged, Channel, Codec
from .books import grid_step
from .scales import Moments, Scales

# Ratios of a rank's scale to the shared one travel in steps of 1/1024.
_FINE = 1024


@dataclass(frozen=True)
class Lanes(Codec):
    """Values rounded to integers of ``bits`` bits (2 to 16) on a grid that all ranks share, summed in int64 lanes.

    A lane has ``bits + ceil(log2(N))`` bits for N ranks, so a word holds ``64 // that`` values: 10 of 4 bits at N = 4.
    The grid's step is the best for the group's distribution (Gaussian or Laplacian, by the kurtosis of the last
    averages) at its scale, which the words carry along (4 bytes a group) and which counts from the next step on.

    Args:
        bits: of one value.
        stochastic: round up or down at random, without bias; else to nearest.
    """

    bits: int
    stochastic: bool = True

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 16:
            raise ValueError(f"lanes take 2 to 16 bits, got {self.bits}")

    @property
    def name(self) -> str:
        return f"lanes{self.bits}"

    def channel(self, groups: int, ranks: int, rank: int, device: torch.device) -> Channel:
        return _LanesChannel(self, groups, ranks, rank, device)


class _LanesChannel(Channel):
    def __init__(self, codec: Lanes, groups: int, ranks: int, rank: int, device: torch.device) -> None:
        super().__init__(groups, ranks, rank, device)
        self.bits, self.stochastic = codec.bits, codec.stochastic
        self.width = codec.bits + (ranks - 1).bit_length()
        if self.width > 32:
            raise ValueError(f"{codec.name} has no room for the sum of {ranks} ranks")
        self.steps = grid_step(2 ** (codec.bits - 1) - 1, codec.stochastic).double().to(device)
        self.scales = Scales(groups, device)

    def deal(self, slots: list[int]) -> None:
        super().deal(slots)
        self.body = -(-self.count // (64 // self.width))
        #: The values' words; how many ranks are invalid; two groups' scales a word.
        self.words = torch.zeros(self.body + 1 + -(-self.groups // 2), dtype=torch.int64, device=self.device)

    def average(self, values: Tensor, invalid: Tensor, key: int) -> Averaged:
        moments = Moments(values, self.edges)
        if not self.scales.known:
            yield from self.scales.first(moments, self.ranks)
        shared = self.scales.local
        step = (shared * self.steps[self.scales.kind]).float()
        words, rest = self.words[: self.body], self.words[self.body :]
        ops.lanes_encode(
            values, step, self.edges, words, self.lost, self.bits, self.width, key if self.stochastic else -1
        )
        rest[:1] = invalid
        # A sum of ratios stays below 2**31, so that two of them share a word as values share theirs.
        most = 2**31 // self.ranks - 1
        ratio = (moments.rms / shared * _FINE).round().clamp(0, most).long()
        low, high = torch.nn.functional.pad(ratio, (0, -self.groups % 2)).view(-1, 2).unbind(1)
        rest[1:] = low + (high << 32)
        total = yield allreduce(self.words)
        ops.lanes_decode(total[: self.body], step, self.edges, self.mean, self.width, 1.0 / self.ranks)
        both = total[self.body + 1 :]
        sums = torch.stack([both & 0xFFFFFFFF, both >> 32], 1).view(-1)[: self.groups]
        self.scales.follow(shared * sums / (_FINE * self.ranks), Moments(self.mean, self.edges))
        self.mean.masked_fill_(total[self.body] != 0, float("nan"))
        return self.mean, self.lost

    def mark(self) -> None:
        self.scales.mark()

    def undo(self) -> None:
        self.scales.undo()

    def state(self) -> dict[str, Any]:
        return self.scales.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self.scales.load_state(state)
