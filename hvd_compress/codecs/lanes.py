"""Integers packed into lanes of int64 words, summed by an allreduce."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .. import ops
from ..engine.arguments import check_flag, check_integer
from ..engine.collectives import allreduce
from ..engine.modes import modes_off
from ..engine.state import Entry, TensorLeaf, Tree
from ..reference.scales import LARGEST, SMALLEST, bounded, divided
from .base import Averaged, Channel, Codec
from .codebooks import DISTRIBUTIONS, mass_and_moment
from .scales import Moments


@dataclass(frozen=True)
class Lanes(Codec):
    """Values rounded to integers on a grid that all ranks share, summed in lanes of int64 words.

    A lane has ``bits + ceil(log2(N))`` bits for N ranks, so that no carry crosses lanes: with 4 bits and N = 4, a word
    holds 10 values. The grid's step is optimal for the group's distribution (Gaussian or Laplacian, by the kurtosis of
    the last averages) and scale. Scales are sent in the same message (4 bytes per group), for the next step.

    Args:
        bits: bits per value, 2 to 16.
        stochastic: unbiased stochastic rounding; otherwise rounding to nearest.
    """

    bits: int
    stochastic: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", check_integer("bits of lanes", self.bits, 2, 16))
        object.__setattr__(self, "stochastic", check_flag("stochastic", self.stochastic))

    @property
    def name(self) -> str:
        return f"lanes{self.bits}"

    def channel(self, groups: int, ranks: int, rank: int, device: torch.device) -> Channel:
        return _LanesChannel(self, groups, ranks, rank, device)


class _LanesChannel(Channel):
    """Keeps scales with the same bits on every rank, which follow the values from step to step.

    ``sent``: moving averages of the root mean squares of the ranks' values, float64, (groups,). ``kind``: int64,
    (groups,), 0 if the averages look Gaussian, 1 if Laplacian. ``known``: false before the first step.
    """

    def __init__(self, codec: Lanes, groups: int, ranks: int, rank: int, device: torch.device) -> None:
        super().__init__(groups, ranks, rank, device)
        self.bits, self.stochastic = codec.bits, codec.stochastic
        self.width = codec.bits + (ranks - 1).bit_length()
        if self.width > 32:
            raise ValueError(f"the lanes of {codec.name} must have at most 32 bits, got {self.width} for {ranks} ranks")
        self.grid = grid_step(2 ** (codec.bits - 1) - 1, codec.stochastic).double().to(device)
        self.step = torch.empty(groups, dtype=torch.float32, device=device)
        self.known = False
        self.sent = torch.ones(groups, dtype=torch.float64, device=device)
        self.kind = torch.zeros(groups, dtype=torch.int64, device=device)
        self.begin_step()

    def set_group_sizes(self, sizes: list[int]) -> None:
        super().set_group_sizes(sizes)
        self.parts = [-(-self.count // (64 // self.width)), 1 + -(-self.groups // 2)]
        # The lanes, and the header (see reference/scales.py).
        self.words = torch.zeros(sum(self.parts), dtype=torch.int64, device=self.device)
        self.body, self.header = torch.split(self.words, self.parts)

    def average(self, values: Tensor, invalid: Tensor, key: int) -> Averaged:
        edges, step = self.edges, self.step
        if not self.known:  # the scales of the first step
            moments = Moments(values, edges)
            mine = moments.square / moments.count.clamp(min=1)
            total = yield allreduce(torch.where(moments.count > 0, mine, 0.0), "budget", "scales")
            self.sent, self.known = bounded(divided(total, self.ranks).sqrt()), True
        ops.lanes_prepare(values, edges, self.sent, self.kind, self.grid, invalid, step, self.header, self.ranks)
        key = key if self.stochastic else -1
        ops.lanes_encode(values, step, edges, self.body, self.quantization_error, self.bits, self.width, key)
        body, header = torch.split((yield allreduce(self.words)), self.parts)
        ops.lanes_decode(body, step, edges, self.mean, self.width, 1.0 / self.ranks)
        # New tensors, because undo_step restores the old ones.
        sent, kind = torch.empty_like(self.sent), torch.empty_like(self.kind)
        ops.lanes_update(self.mean, edges, self.sent, self.kind, header, sent, kind, self.ranks)
        self.sent, self.kind = sent, kind
        return self.mean, self.quantization_error

    def begin_step(self) -> None:
        self._saved = self.known, self.sent, self.kind

    def undo_step(self) -> None:
        """Restores the scales before the step. If it has failed on some ranks only, they would differ."""
        self.known, self.sent, self.kind = self._saved

    def state(self) -> Tree:
        """The saved state, with ranges, since the operators do not check scales."""
        return {
            "known": Entry(vars(self), "known", bool),
            "sent": TensorLeaf(self.sent, SMALLEST, LARGEST),
            "kind": TensorLeaf(self.kind, 0, 1),
        }


@lru_cache
@modes_off
def grid_step(top: int, stochastic: bool) -> Tensor:
    """The step of the grid ``-top .. top`` with the least mean squared error of rounding and clipping, for each of
    :data:`.codebooks.DISTRIBUTIONS`: float32, (2,). Chosen from a short list: the last bits of ``erf`` and ``exp``
    differ between machines."""
    x = (torch.arange(40000, dtype=torch.float64, device="cpu") + 0.5) * (16.0 / 40000)
    best = []
    for distribution in DISTRIBUTIONS:
        mass, _ = mass_and_moment(torch.cat([x - 0.5 * 16 / 40000, x[-1:] + 0.5 * 16 / 40000]), distribution)
        weight = -mass.diff()
        steps = [2.0 ** (k / 16) / top for k in range(-32, 65)]
        errors = []
        for step in steps:
            scaled = (x / step).clamp(max=top)
            part = scaled - scaled.floor()
            square = part * (1 - part) if stochastic else torch.minimum(part, 1 - part) ** 2
            errors.append(float(((square * step * step + (x - scaled * step) ** 2) * weight).sum()))
        best.append(steps[min(range(len(steps)), key=errors.__getitem__)])
    return torch.tensor(best, dtype=torch.float32, device="cpu")
