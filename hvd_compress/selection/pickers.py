"""Picks the entries of a bucket, and tells their positions."""

import abc
import math
from itertools import accumulate

import torch
from torch import Tensor

from .. import ops, reference
from ..engine.bucket import Bucket
from ..reference import BLOCK, Draw, flat_positions
from .base import Average, BlockRange, Scoring, StepSeed, half, whole

#: The most entries of a bucket whose positions fit in int32.
INT32_ENTRIES = 2**31


class Picker(abc.ABC):
    """Picks entries of a bucket. Piece i has ``slots[i]`` slots, in :meth:`span`. ``indices``: the entries of the
    current step, in slot order, once they are decided."""

    #: dtype of an index on the wire.
    dtype = torch.uint8
    #: Whether entries are picked by the operator that accumulates gradients, which has them in the cache.
    early = False
    #: Whether :meth:`pick_by` needs scores.
    scored = False
    #: Whether the entries of a step come from one half of each piece's blocks.
    halves = False
    indices: Tensor
    #: The operators' table: first block, blocks, first slot, slots of every piece; int64, (pieces, 4).
    table: Tensor

    def __init__(self, bucket: Bucket, slots: list[int]) -> None:
        self.bucket, self.slots, self.total = bucket, slots, sum(slots)
        self._first = list(accumulate(slots[:-1], initial=0))
        #: The blocks of each piece from which this step's entries come.
        self.ranges = [whole(piece) for piece in bucket.pieces]
        # Made once: creating it in each step would synchronise a GPU.
        self.slot_counts = torch.tensor(slots, dtype=torch.int64, device=bucket.device)

    def span(self, index: int) -> slice:
        """The slots of a piece."""
        return slice(self._first[index], self._first[index] + self.slots[index])

    def begin(self, seed: StepSeed) -> None:
        self._seed, self.phase = seed, seed.phase

    def rotate(self, phase: int) -> None:
        """Replaces the seed's phase (:attr:`.base.StepSeed.phase`)."""
        self.phase = phase

    def decided(self, indices: Tensor) -> None:
        """Called with the step's ``indices``."""
        self.indices = indices

    def pick(self, scoring: Scoring, own: Tensor) -> None:
        """Completes ``own``, this rank's indices, when all gradients have arrived."""

    def pick_by(self, scores: list[Tensor], explore: float) -> None:
        """Picks ``indices`` by scores that are the same on all ranks: by piece, float32, (entries,), in memory order.
        ``explore``: the share of blocks in which entries are drawn at random, in proportion to the scores."""

    def checksum(self) -> Tensor | int:
        """A checksum, below 2**32, of the entries of :meth:`pick_by`."""
        return 0

    def positions(self, indices: Tensor) -> Tensor:
        """The positions of ``indices``, one for each slot, in the bucket's flat memory: int64, (slots,)."""
        return indices.long()

    @abc.abstractmethod
    def gather(self, memory: Tensor, out: Tensor) -> Tensor:
        """Writes the picked entries of a bucket-wide tensor to ``out``, float32, (slots,), and returns it."""

    @abc.abstractmethod
    def write(self, memory: Tensor, values: Tensor) -> None:
        """The inverse of :meth:`gather`."""

    @abc.abstractmethod
    def scatter(self, targets: list[Tensor], velocity: Tensor | None, average: Average) -> None:
        """Writes an average to ``targets`` (one tensor per piece, or empty), and the quantization error to the
        residual; see :func:`hvd_compress.reference.scatter`."""

    def read(self, memory: Tensor) -> Tensor:
        """As :meth:`gather`, in new memory."""
        return self.gather(memory, torch.empty(self.total, dtype=torch.float32, device=memory.device))


def table_of(ranges: list[BlockRange], picker: Picker) -> Tensor:
    """The operators' table: first block, blocks, first slot, slots of every piece; int64, (pieces, 4)."""
    rows = [(r.first, r.blocks, picker.span(i).start, picker.slots[i]) for i, r in enumerate(ranges)]
    return torch.tensor(rows, dtype=torch.int64, device=picker.bucket.device)


class Blocks(Picker):
    """m of every 256 entries, one byte an index. ``halves``: in turn of the first and last half of a piece's blocks."""

    early = scored = True

    def __init__(self, bucket: Bucket, slots: list[int], halves: bool = False) -> None:
        super().__init__(bucket, slots)
        self.halves = halves
        turns = [[half(p, (t + i) % 2) for i, p in enumerate(bucket.pieces)] for t in range(2)] if halves else []
        self._ranges = turns or [self.ranges]
        self._tables = [table_of(ranges, self) for ranges in self._ranges]
        self._rows = [table.cpu() for table in self._tables]

    def begin(self, seed: StepSeed) -> None:
        super().begin(seed)
        self._turn = seed.step % len(self._ranges)
        self.ranges, self.table = self._ranges[self._turn], self._tables[self._turn]
        # The begin of each slot's block in the bucket's flat memory.
        self._base: Tensor | None = None

    def pick_by(self, scores: list[Tensor], explore: float) -> None:
        self.indices = torch.zeros(self.total, dtype=torch.uint8, device=self.bucket.device)
        draw = Draw(self.phase, 1, 1, 0, self._seed.key, int(explore * 2**32))
        ops.select(scores, self.table, self.indices, *draw)

    def checksum(self) -> Tensor:
        place = torch.arange(self.total, dtype=torch.int64, device=self.bucket.device) % 4093 + 1
        return (self.indices * place).sum()

    def positions(self, indices: Tensor) -> Tensor:
        if self._base is None:
            # The table is read by the host: on a GPU it would synchronise.
            self._base = flat_positions(torch.zeros_like(indices), self._rows[self._turn], self.phase)
        return self._base + indices

    def gather(self, memory: Tensor, out: Tensor) -> Tensor:
        ops.gather(memory, self.indices, self.table, out, self.phase)
        return out

    def write(self, memory: Tensor, values: Tensor) -> None:
        # scatter writes an error to a residual: here, the values to the memory.
        nothing = self.bucket.nothing()
        ops.scatter(nothing, memory, None, self.indices, self.table, values, values, self.phase, 0.0)

    def scatter(self, targets: list[Tensor], velocity: Tensor | None, average: Average) -> None:
        a, out = average, average.output
        if self.halves:
            targets = [r.of(t) if t.numel() else t for r, t in zip(self.ranges, targets, strict=True)]
        where = (self.indices, self.table, a.mean, a.error, self.phase)
        ops.scatter(targets, self.bucket.residual, velocity, *where, out.scale, a.block_means, out.transform, out.sign)


class Exact(Picker):
    """The largest entries of every piece: four bytes an index, eight in a bucket of more than 2**31 entries. With
    ``sample``, they are found as in DGC (Lin et al., 2018): a sample of this share of the entries gives a threshold,
    and only the entries above it are sorted. (Their number depends on the data, so this synchronises a GPU.)"""

    #: The threshold lets this many times more entries through than needed, so that they are seldom too few.
    MARGIN = 1.3
    MIN_SAMPLE = 64

    def __init__(self, bucket: Bucket, slots: list[int], sample: float | None = None) -> None:
        super().__init__(bucket, slots)
        self.sample = sample
        self.dtype = torch.int32 if bucket.blocks * BLOCK <= INT32_ENTRIES else torch.int64
        # Read by the host in every step: on a GPU it would synchronise.
        self.table = table_of(self.ranges, self).cpu()

    def pick(self, scoring: Scoring, own: Tensor) -> None:
        for index, piece in enumerate(self.bucket.pieces):
            best = self.largest(scoring.score(self.bucket, index), self.slots[index])
            own[self.span(index)] = (best.sort().values + piece.first_block * BLOCK).to(self.dtype)

    def largest(self, score: Tensor, count: int) -> Tensor:
        """The indices of the ``count`` largest scores of a piece: int64, (count,)."""
        if self.sample is None or not count:
            return score.topk(count).indices
        stride = max(1, score.numel() // max(round(self.sample * score.numel()), self.MIN_SAMPLE))
        sampled = score[self.phase % stride :: stride]
        rank = min(math.ceil(self.MARGIN * count * sampled.numel() / score.numel()), sampled.numel())
        above = (score >= sampled.topk(rank).values[-1]).nonzero().view(-1)
        if above.numel() < count:
            return score.topk(count).indices
        return above[score[above].topk(count).indices]

    def gather(self, memory: Tensor, out: Tensor) -> Tensor:
        return torch.index_select(memory, 0, self.indices, out=out)

    def write(self, memory: Tensor, values: Tensor) -> None:
        memory[self.indices.long()] = values

    def scatter(self, targets: list[Tensor], velocity: Tensor | None, average: Average) -> None:
        a, residual, where, scale = average, self.bucket.residual, self.indices.long(), average.output.scale
        reference.scatter_at(targets, residual, velocity, where, self.table, a.mean, a.error, scale)


class Everything(Picker):
    """Density 1: every entry, padding included."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket, [piece.blocks * BLOCK for piece in bucket.pieces])

    def gather(self, memory: Tensor, out: Tensor) -> Tensor:
        return out.copy_(memory)

    def write(self, memory: Tensor, values: Tensor) -> None:
        memory.copy_(values)

    def scatter(self, targets: list[Tensor], velocity: Tensor | None, average: Average) -> None:
        # The velocity is kept, as in plain momentum: no entry was delayed.
        residual, mean, output = self.bucket.residual, average.mean, average.output
        # Free on the CPU; a GPU would be synchronised.
        all_sent = mean.is_cpu and bool(mean.sum().isfinite())
        residual.copy_(average.error if all_sent else torch.where(mean.isfinite(), average.error, residual))
        if average.block_means is not None:
            mean = mean + average.block_means.repeat_interleave(BLOCK)
        output.write(self.bucket, mean.clone() if output.transform else mean, targets)
