"""Picks the entries of a bucket, and tells their positions."""

import abc
from collections.abc import Iterable
from itertools import accumulate

import torch
from torch import Tensor

from .. import ops
from ..engine.bucket import Bucket
from ..engine.rng import derive
from ..engine.work import Step
from ..reference import BLOCK, Draw, flat_positions
from .base import NOT_SENT, Average, Scoring


class Picker(abc.ABC):
    """Picks entries of a bucket. Piece i has ``slots[i]`` slots, in :meth:`span`. ``indices``: the entries of the
    current step, in slot order, once they are decided."""

    #: dtype of an index on the wire.
    dtype = torch.uint8
    #: Whether entries are picked by the operator that accumulates gradients, which has them in the cache.
    early = False
    indices: Tensor

    def __init__(self, bucket: Bucket, slots: list[int]) -> None:
        self.bucket, self.slots, self.total = bucket, slots, sum(slots)
        self._first = list(accumulate(slots[:-1], initial=0))
        #: The operators' table.
        self.table = self.table_of((piece.first_block, piece.blocks) for piece in bucket.pieces)
        # Made once: creating it in each step would synchronise a GPU.
        self.slot_counts = torch.tensor(slots, dtype=torch.int64, device=bucket.device)

    def table_of(self, ranges: Iterable[tuple[int, int]]) -> Tensor:
        """First block, blocks, first slot, slots of every piece; int64, (pieces, 4). ``ranges``: the first two."""
        rows = [(*blocks, self._first[i], self.slots[i]) for i, blocks in enumerate(ranges)]
        return torch.tensor(rows, dtype=torch.int64, device=self.bucket.device)

    def span(self, index: int) -> slice:
        """The slots of a piece."""
        return slice(self._first[index], self._first[index] + self.slots[index])

    def without_missing(self, mean: Tensor, targets: list[Tensor]) -> Tensor:
        """``mean`` with :data:`.base.NOT_SENT` for pieces for which no gradient arrived, whose target is empty. (Not in
        place: ``mean`` may be in use.)"""
        missing = [self.span(index) for index, target in enumerate(targets) if not target.numel()]
        mean = mean.clone() if missing else mean
        for span in missing:
            mean[span] = NOT_SENT
        return mean

    def begin(self, step: Step) -> None:
        #: The key of the step's random numbers, the same on all ranks.
        self.key = derive(step.seed, step.number, self.bucket.index)
        self.rotate(self.key & 0xFFFF)

    def rotate(self, phase: int) -> None:
        """Sets the rotation of the blocks that get the slots that do not divide evenly."""
        self.phase = phase

    def decided(self, indices: Tensor) -> None:
        """Called with the step's ``indices``."""
        self.indices = indices

    def pick(self, scoring: Scoring, own: Tensor) -> None:
        """Completes ``own``, this rank's indices, when all gradients have arrived."""

    def checksum(self) -> Tensor | int:
        """A checksum, below 2**32, of entries that were picked by the same scores on all ranks."""
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


class Blocks(Picker):
    """m of every 256 entries, one byte an index."""

    early = True

    def __init__(self, bucket: Bucket, slots: list[int]) -> None:
        super().__init__(bucket, slots)
        # Read by the host: on a GPU it would synchronise.
        self.rows = self.table.cpu()

    def begin(self, step: Step) -> None:
        super().begin(step)
        # The begin of each slot's block in the bucket's flat memory.
        self._base: Tensor | None = None

    def pick_by(self, scores: list[Tensor], explore: float) -> None:
        """Picks ``indices`` by scores that are the same on all ranks: by piece, float32, (entries,), in memory order.
        ``explore``: the share of blocks in which entries are drawn at random, in proportion to the scores."""
        self.indices = torch.zeros(self.total, dtype=torch.uint8, device=self.bucket.device)
        draw = Draw(self.phase, 1, 1, 0, self.key, int(explore * 2**32))
        ops.select(scores, self.table, self.indices, *draw)

    def checksum(self) -> Tensor:
        place = torch.arange(self.total, dtype=torch.int64, device=self.bucket.device) % 4093 + 1
        return (self.indices * place).sum()

    def positions(self, indices: Tensor) -> Tensor:
        if self._base is None:
            self._base = flat_positions(torch.zeros_like(indices), self.rows, self.phase)
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
        where = (self.indices, self.table, a.mean, a.error, self.phase)
        ops.scatter(targets, self.bucket.residual, velocity, *where, out.scale, a.block_means, out.transform, out.sign)


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
