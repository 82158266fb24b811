"""Entries that every rank picks for itself, and sends to all ranks."""

import torch
from torch import Tensor

from .. import reference
from ..engine.agreement import Agreement
from ..engine.bucket import Bucket
from ..reference import BLOCK
from .base import Average, Scoring
from .deciders import Leaders
from .idle import Idle
from .pickers import Picker

#: The most entries of a bucket whose positions fit in int32.
INT32_ENTRIES = 2**31


class EachRank(Leaders):
    """Every rank picks its own entries and sends them to all ranks, so that the bytes grow with the ranks."""

    def __init__(self, picker: Picker, idle: Idle, agreement: Agreement) -> None:
        super().__init__(picker, idle, agreement, run=1, ranks=1, rank=0)
        # Whether indices are sent as one bit for every entry of the bucket, because that is shorter.
        self._as_bitmap = picker.dtype == torch.uint8 and picker.total * 8 > picker.bucket.blocks * BLOCK

    def encode(self, scoring: Scoring) -> Tensor:
        self.complete(scoring)
        picker = self.picker
        picker.decided(self.own[: picker.total])
        if not self._as_bitmap:
            return self.message
        bits = torch.zeros(picker.bucket.blocks * BLOCK, dtype=torch.uint8, device=self.own.device)
        bits[picker.positions(picker.indices)] = 1
        weight = 1 << torch.arange(8, device=bits.device, dtype=torch.uint8)
        return torch.cat([self.message[: self.head], (bits.view(-1, 8) * weight).sum(1, dtype=torch.uint8)])

    def decode(self, gathered: Tensor, ranks: int) -> list[Tensor]:
        """Each rank's entries, as positions in the bucket: int64, (slots,). Raises as :meth:`agree`."""
        return [self._positions(row) for row in self.indices_by_rank(gathered, ranks)]

    def _positions(self, indices: Tensor) -> Tensor:
        total = self.picker.total
        if not self._as_bitmap:
            return self.picker.positions(indices[:total])
        shift = torch.arange(8, device=indices.device, dtype=torch.uint8)
        # A block's slots are in ascending order, and so are the set bits. Their number is known: counting them would
        # synchronise a GPU.
        return ((indices[:, None] >> shift) & 1).view(-1).nonzero_static(size=total).view(-1)


class Exact(Picker):
    """The largest entries of every piece: four bytes an index, eight in a bucket of more than 2**31 entries."""

    def __init__(self, bucket: Bucket, slots: list[int]) -> None:
        super().__init__(bucket, slots)
        self.dtype = torch.int32 if bucket.blocks * BLOCK <= INT32_ENTRIES else torch.int64
        # Read by the host in every step: on a GPU it would synchronise.
        self.table = self.table.cpu()

    def pick(self, scoring: Scoring, own: Tensor) -> None:
        for index, piece in enumerate(self.bucket.pieces):
            best = self.largest(scoring.score(self.bucket, index), self.slots[index])
            own[self.span(index)] = (best.sort().values + piece.first_block * BLOCK).to(self.dtype)

    def largest(self, score: Tensor, count: int) -> Tensor:
        """The indices of the ``count`` largest scores of a piece: int64, (count,)."""
        return score.topk(count).indices

    def gather(self, memory: Tensor, out: Tensor) -> Tensor:
        return torch.index_select(memory, 0, self.indices, out=out)

    def write(self, memory: Tensor, values: Tensor) -> None:
        memory[self.indices.long()] = values

    def scatter(self, targets: list[Tensor], velocity: Tensor | None, average: Average) -> None:
        a, residual, where, scale = average, self.bucket.residual, self.indices.long(), average.output.scale
        reference.scatter_at(targets, residual, velocity, where, self.table, a.mean, a.error, scale)
