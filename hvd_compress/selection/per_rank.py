"""Every rank sends entries of its own choice to all others: what papers without a ring do.

Two allgathers: which entries; and their values.
"""

import abc
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..engine.bucket import Bucket
from ..codecs import Codec, CodedGather, codec
from ..codecs.coded import GatherChannel
from ..engine.collectives import allgather
from ..engine.exchange import Exchange
from ..reference import BLOCK, positions
from .base import Averages, BlockSelection, Led, Rule, TopkSelection, Turn

if TYPE_CHECKING:
    from ..methods.sparse import Plan, Sparse


def gathered(values: str | Codec) -> Codec:
    """The codec; raises ``ValueError`` for one that does not send every rank's own values to all others."""
    found = codec(values)
    if not isinstance(found, CodedGather):
        raise ValueError(
            f"every rank sends its own entries: values have to be gathered, as fp16-gather; got {found.name}"
        )
    return found


class Own(Led):
    """Entries that this rank chooses for itself alone: as if there were no other."""

    def begin(self, turn: Turn, check: bool) -> None:
        super().begin(replace(turn, order=[0]), check)

    def message(self, rule: Rule) -> Tensor:
        """The stamp that all ranks share, and this rank's picks."""
        self.choose(rule)
        # A copy: the next step's picks are written while these may still be due.
        self.picks = self.own[: self.total].clone()
        return self.plane

    def places(self, gathered: Tensor, ranks: int, rule: Rule) -> list[Tensor]:
        """Each rank's entries in the bucket's flat memory, in slot order: int64, (slots,); raises as
        :meth:`picks_by_rank` does."""
        return [self.decoded(row) for row in self.picks_by_rank(gathered, ranks, rule)]

    @abc.abstractmethod
    def decoded(self, picks: Tensor) -> Tensor:
        """One rank's entries, as its message has them, in the bucket's flat memory."""


class OwnBlocks(Own, BlockSelection):
    """m of every 256."""

    def __init__(self, bucket: Bucket, slots: list[int]) -> None:
        super().__init__(bucket, slots, run=1, ranks=1, rank=0)
        #: The segments' table on the host, which reads it in every step: a GPU would be waited for.
        self.rows = self.segments.cpu()
        #: A bit for every entry of the bucket, if that is shorter than a byte a slot.
        self.as_bitmap = self.total * 8 > bucket.blocks * BLOCK

    def begin(self, turn: Turn, check: bool) -> None:
        super().begin(turn, check)
        #: Where each slot's block begins, in the bucket's flat memory: the same on all ranks.
        self.base = positions(torch.zeros_like(self.own[: self.total]), self.rows, self.phase)

    def message(self, rule: Rule) -> Tensor:
        plane = super().message(rule)
        if not self.as_bitmap:
            return plane
        bits = torch.zeros(self.bucket.blocks * BLOCK, dtype=torch.uint8, device=self.bucket.device)
        bits[self.base + self.picks] = 1
        weight = 1 << torch.arange(8, device=bits.device, dtype=torch.uint8)
        return torch.cat([plane[: self.head], (bits.view(-1, 8) * weight).sum(1, dtype=torch.uint8)])

    def decoded(self, picks: Tensor) -> Tensor:
        if not self.as_bitmap:
            return self.base + picks[: self.total]
        shift = torch.arange(8, device=picks.device, dtype=torch.uint8)
        # A block's slots are in ascending order of offset, and blocks ascend: so are the set bits. How many they are is
        # known: to count them, a GPU would be waited for.
        return ((picks[:, None] >> shift) & 1).view(-1).nonzero_static(size=self.total).view(-1)


class OwnLargest(Own, TopkSelection):
    """The largest of every parameter, exactly."""

    def __init__(self, bucket: Bucket, slots: list[int]) -> None:
        super().__init__(bucket, slots, run=1, ranks=1, rank=0)

    def decoded(self, picks: Tensor) -> Tensor:
        return picks[: self.total].long()


class OwnSampled(OwnLargest):
    """The same, found as DGC does (Lin et al., 2018): a sample guesses a threshold, and only what is above it is
    sorted. (How many those are, only they can tell: it waits for a GPU.)"""

    #: How many more than wanted the guess lets through, so that it is seldom too few.
    MORE = 1.3
    LEAST = 64

    def __init__(self, bucket: Bucket, slots: list[int], sample: float) -> None:
        super().__init__(bucket, slots)
        self.sample = sample

    def largest(self, position: int, score: Tensor, count: int) -> Tensor:
        if count == 0:
            return super().largest(position, score, count)
        stride = max(1, score.numel() // max(round(self.sample * score.numel()), self.LEAST))
        seen = score[self.phase % stride :: stride]
        rank = min(math.ceil(self.MORE * count * seen.numel() / score.numel()), seen.numel())
        threshold = seen.topk(rank).values[-1]
        above = (score >= threshold).nonzero().view(-1)
        if above.numel() < count:
            return super().largest(position, score, count)
        return above[score[above].topk(count).indices]


def average_own(method: "Sparse", bucket: Bucket, plan: "Plan") -> Exchange:
    """The mean over ranks of what each has picked, zero where it has not: assigned. It leaves the residual."""
    selection, channel = plan.selection, plan.channel
    assert isinstance(selection, Own) and isinstance(channel, GatherChannel)
    ranks = channel.ranks
    gathered = yield allgather(selection.message(plan.rule), "indices")
    places = selection.places(gathered, ranks, plan.rule)
    values = selection.take(bucket.residual)
    gathered = yield allgather(channel.write(values, plan.invalid), "values")
    mean = torch.zeros_like(bucket.residual)
    theirs = torch.empty_like(values)
    for rank, place in enumerate(places):
        channel.read(gathered, rank, theirs, add=False)
        mean[place] += theirs
    mean *= 1.0 / ranks
    # One bad rank makes the step bad for all.
    mean.masked_fill_(channel.any_invalid(gathered), float("nan"))
    arrived = mean[:1].isfinite().expand(selection.total)
    nowhere = [torch.empty(0, device=bucket.device)] * len(bucket.segments)
    fine = torch.where(arrived, 0.0, float("nan"))
    targets = method.targets(bucket, plan)
    selection.put(nowhere, bucket.state.get("velocity"), Averages(selection.spare(targets, fine), channel.lost, 0.0))
    for segment, target in zip(bucket.segments, targets, strict=True):
        if target.numel():
            target.as_strided((target.numel(),), (1,)).copy_(segment.of(mean)[: target.numel()] * method.scale)
    plan.sent = True
