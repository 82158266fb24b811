"""Selections that every rank computes from shared state: no indices are sent, and each entry has at most one slot."""

import abc

import torch
from torch import Tensor

from .. import ops
from ..engine.agreement import LIMIT, all_equal, disagreement
from ..engine.bucket import Bucket, Segment
from ..engine.collectives import allreduce
from ..reference import BLOCK
from .base import Agreement, Average, BlockRange, Scoring, Selection, StepSeed, segment_table, whole


class SharedSelection(Selection):
    """The same entries on all ranks, without a leader."""

    #: Whether only half of the entries may be sent in a step.
    halves = False

    def agree(self, scoring: Scoring) -> Agreement:
        """No message of this selection shows whether the ranks select alike, so they compare digests: in every step,
        since all ranks have to take part."""
        same = yield from all_equal(self.shared_digest())
        scoring.disagree.logical_or_(~same)
        if self.check and bool(scoring.disagree):
            raise disagreement()

    def shared_digest(self) -> Tensor:
        """A digest of what all ranks must select alike: int64, (1,), below ``LIMIT``."""
        return torch.full((1,), self.digest() % LIMIT, dtype=torch.int64, device=self.bucket.device)

    def candidates(self) -> list[BlockRange]:
        """The blocks of each segment from which this step's entries come."""
        return [whole(segment) for segment in self.bucket.segments]

    @abc.abstractmethod
    def read(self, memory: Tensor) -> Tensor:
        """As :meth:`gather`, in new memory."""

    @abc.abstractmethod
    def write(self, memory: Tensor, values: Tensor) -> None:
        """The inverse of :meth:`read`."""


class AllEntries(SharedSelection):
    """Density 1: every entry, padding included."""

    def __init__(self, bucket: Bucket, finds_idle: bool = False) -> None:
        super().__init__(bucket, [segment.blocks * BLOCK for segment in bucket.segments])
        self.finds_idle = finds_idle

    def agree(self, scoring: Scoring) -> Agreement:
        yield from super().agree(scoring)
        if self.finds_idle:
            touched = yield allreduce(self.touched, "budget", "touched")
            self.find_idle(touched > 0)

    def gather(self, memory: Tensor) -> Tensor:
        return self.values.copy_(memory)

    def scatter(self, targets: list[Tensor], velocity: Tensor | None, average: Average) -> None:
        # The velocity is kept, as in plain momentum: no entry was delayed.
        residual, mean = self.bucket.residual, average.mean
        residual.copy_(torch.where(mean.isfinite(), average.error, residual))
        if average.block_means is not None:
            mean = mean + average.block_means.repeat_interleave(BLOCK)
        average.output.write(self.bucket, mean.clone(), targets)

    def read(self, memory: Tensor) -> Tensor:
        return memory.clone()

    def write(self, memory: Tensor, values: Tensor) -> None:
        memory.copy_(values)


class ScoredSelection(SharedSelection):
    """m of every 256 entries by scores that are equal on all ranks.

    ``halves``: only in the first or the last half of each parameter's blocks, in alternating steps. A single block
    counts as both halves.
    """

    def __init__(self, bucket: Bucket, slots: list[int], halves: bool) -> None:
        super().__init__(bucket, slots)
        self.halves = halves
        # Made once: creating them in each step would synchronise a GPU.
        self._ranges = [self._ranges_of(turn) for turn in range(2 if halves else 1)]
        self._rows = [segment_table(ranges, slots, self.first, bucket.device) for ranges in self._ranges]

    def _ranges_of(self, turn: int) -> list[BlockRange]:
        segments = enumerate(self.bucket.segments)
        return [half(s, (turn + i) % 2) if self.halves else whole(s) for i, s in segments]

    def begin_step(self, seed: StepSeed, check: bool) -> None:
        super().begin_step(seed, check)
        turn = seed.step % len(self._ranges)
        self.ranges, self.rows = self._ranges[turn], self._rows[turn]
        self.indices = torch.zeros(self.total, dtype=torch.uint8, device=self.bucket.device)

    def shared_digest(self) -> Tensor:
        place = torch.arange(self.total, dtype=torch.int64, device=self.bucket.device) % 4093 + 1
        return (super().shared_digest() + (self.indices * place).sum()) % LIMIT

    def candidates(self) -> list[BlockRange]:
        return self.ranges

    def select(self, position: int, score: Tensor, explore: float) -> None:
        """Selects a segment's entries by the ``score`` of its candidates: float32, (entries,)."""
        slots, first, key = self.slots[position], self.first[position], self.key(position)
        score = torch.nn.functional.pad(score, (0, self.ranges[position].blocks * BLOCK - score.numel()))
        ops.select(score, self.indices, slots, first, self.phase, 1, 1, 0, key, int(explore * 2**32))

    def gather(self, memory: Tensor) -> Tensor:
        ops.gather(memory, self.indices, self.rows, self.values, self.phase)
        return self.values

    def scatter(self, targets: list[Tensor], velocity: Tensor | None, average: Average) -> None:
        a, residual = average, self.bucket.residual
        parts = [r.of(t) if t.numel() else t for r, t in zip(self.ranges, targets, strict=True)]
        ops.scatter(parts, residual, velocity, self.indices, self.rows, a.mean, a.error, self.phase, a.output.scale)

    def read(self, memory: Tensor) -> Tensor:
        values = torch.empty(self.total, dtype=torch.float32, device=memory.device)
        ops.gather(memory, self.indices, self.rows, values, self.phase)
        return values

    def write(self, memory: Tensor, values: Tensor) -> None:
        # scatter() writes the quantization error to the residual: here, the values to the memory.
        no_grads = self.bucket.no_targets()
        ops.scatter(no_grads, memory, None, self.indices, self.rows, values, values, self.phase, 0.0)


class RotatingSelection(SharedSelection):
    """Every ``period``-th entry of each parameter: all have been sent after ``period`` steps."""

    def __init__(self, bucket: Bucket, period: int) -> None:
        super().__init__(bucket, [-(-segment.numel // period) for segment in bucket.segments])
        self.period = period

    def parts(self, memory: Tensor) -> list[Tensor]:
        """The selected entries of a bucket-wide tensor, by segment: views."""
        return [self._of(segment.of(memory)[: segment.numel], i) for i, segment in enumerate(self.bucket.segments)]

    def _of(self, flat: Tensor, position: int) -> Tensor:
        return flat[(self.seed.step + position) % self.period :: self.period]

    def _load(self, values: Tensor, memory: Tensor) -> Tensor:
        values.zero_()  # some offsets have one entry fewer than there are slots
        for part, first in zip(self.parts(memory), self.first, strict=True):
            values[first : first + part.numel()] = part
        return values

    def gather(self, memory: Tensor) -> Tensor:
        return self._load(self.values, memory)

    def read(self, memory: Tensor) -> Tensor:
        return self._load(torch.empty(self.total, dtype=torch.float32, device=memory.device), memory)

    def write(self, memory: Tensor, values: Tensor) -> None:
        for part, first in zip(self.parts(memory), self.first, strict=True):
            part.copy_(values[first : first + part.numel()])

    def scatter(self, targets: list[Tensor], velocity: Tensor | None, average: Average) -> None:
        mean, residual = average.mean, self.bucket.residual
        self.write(residual, torch.where(mean.isfinite(), average.error, self.read(residual)))
        # The velocity is kept: all entries wait equally long, and cleared every period it would never build up.
        for position, (target, first) in enumerate(zip(targets, self.first, strict=True)):
            if target.numel():
                entries = self._of(target.as_strided((target.numel(),), (1,)), position)
                entries.copy_(mean[first : first + entries.numel()] * average.output.scale)


def half(segment: Segment, turn: int) -> BlockRange:
    """The first (0) or the last (1) half of a segment's blocks."""
    early = segment.blocks // 2
    if not early:
        return whole(segment)
    if turn:
        return BlockRange(segment.first_block + early, early, segment.blocks - early)
    return BlockRange(segment.first_block, 0, early)


def smaller_half(segment: Segment) -> int:
    """The number of entries in the half that has fewer."""
    early = segment.blocks // 2 * BLOCK
    return min(early, segment.numel - early) if early else segment.numel
