"""Deciders of the entries that are sent. :class:`Leaders`: ranks drawn at random, in one allgather of indices.
:class:`Shared`: all ranks, from shared state, without indices."""

import abc
import zlib
from collections.abc import Generator

import torch
from torch import Tensor

from ..engine.agreement import LIMIT, Agreement
from ..engine.collectives import Request, allgather, allreduce
from ..engine.comparison import disagreement
from ..engine.rng import permutation
from ..engine.work import Step
from ..reference import Draw
from .base import Scoring
from .idle import Idle
from .pickers import Picker

Deciding = Generator[Request, Tensor, None]


class Decider(abc.ABC):
    """Lets ranks decide on the entries of a ``picker``. ``idle`` is told which pieces have a gradient on some rank, if
    it asks for that, and ``agreement`` whether the ranks differ."""

    #: This rank picks ``run`` of every ``run * ranks`` slots, from ``run * position`` on, into ``own``.
    run, ranks, position = 1, 1, 0
    own: Tensor

    def __init__(self, picker: Picker, idle: Idle, agreement: Agreement) -> None:
        self.picker, self.idle, self.agreement, self.device = picker, idle, agreement, picker.bucket.device
        self.none = self.own = torch.empty(0, dtype=torch.uint8, device=self.device)

    def begin(self, step: Step) -> None:
        self.step = step
        self.picker.begin(step)

    @abc.abstractmethod
    def agree(self, scoring: Scoring, following: tuple[Request, ...]) -> Deciding:
        """Exchanges until all ranks know the same entries: ``picker.indices``. ``following``: what they ask for then.
        Raises ``RuntimeError``, on every rank, if they have decided differently."""

    def draw(self, scoring: Scoring) -> Draw:
        """The slots that this rank picks, as arguments of the operators."""
        explore = int(scoring.explore * 2**32)
        return Draw(self.picker.phase, self.run, self.ranks, self.position, self.picker.key, explore)

    def digest(self) -> int:
        """A 32-bit hash of the values that must be equal on all ranks."""
        picker, step = self.picker, self.step
        return zlib.crc32(repr((picker.key, step.number, step.settings, picker.slots)).encode())


class Shared(Decider):
    """The same entries on all ranks, without a leader."""

    def agree(self, scoring: Scoring, following: tuple[Request, ...]) -> Deciding:
        # No other message shows whether the ranks select alike. In every step: all ranks have to take part.
        digest = torch.full((1,), self.digest() % LIMIT, dtype=torch.int64, device=self.device)
        yield from self.agreement.compare((digest + self.picker.checksum()) % LIMIT)
        if self.idle.finds:
            self.idle.found((yield allreduce(self.idle.touched, "budget", "touched")) > 0)


class Leaders(Decider):
    """The slots are divided among all ranks in runs of ``run`` consecutive slots, in an order of ranks drawn anew in
    each step, so that every rank picks equally many entries and the leader of each slot is random."""

    def __init__(self, picker: Picker, idle: Idle, agreement: Agreement, run: int, ranks: int, rank: int) -> None:
        super().__init__(picker, idle, agreement)
        self.run, self.ranks, self.rank = run, ranks, rank
        count = -(-picker.total // (run * ranks)) * run
        self._digest_length = max(1, 4 // picker.dtype.itemsize)
        self.head = self._digest_length + (len(picker.slots) if idle.finds else 0)
        #: This rank's part of the allgather: a digest of at least four bytes; a flag for each piece of which it has a
        #: gradient, if idle pieces are found; the indices that it picks.
        self.message = torch.zeros(self.head + count, dtype=picker.dtype, device=self.device)
        self.own = self.message[self.head :]

    def begin(self, step: Step) -> None:
        super().begin(step)
        self._order = permutation(self.picker.key, self.ranks)
        self.position = self._order.index(self.rank)
        # In every step: other ranks may check in steps in which this one does not.
        self.message[: self._digest_length].view(torch.int32).fill_(self.digest() & 0x7FFFFFFF)

    def agree(self, scoring: Scoring, following: tuple[Request, ...]) -> Deciding:
        self.complete(scoring)
        gathered = yield allgather(self.message, "indices", following=following)
        by_rank = self.indices_by_rank(gathered, self.ranks).view(self.ranks, -1, self.run)
        # In slot order. Not by an index tensor, whose copy to a GPU would synchronise it.
        in_order = torch.stack([by_rank[rank] for rank in self._order], dim=1)
        self.picker.decided(in_order.view(-1)[: self.picker.total])

    def complete(self, scoring: Scoring) -> None:
        """Completes ``message`` when all gradients have arrived."""
        self.picker.pick(scoring, self.own)
        if self.idle.finds:
            self.message[self._digest_length : self.head] = self.idle.touched

    def indices_by_rank(self, gathered: Tensor, ranks: int) -> Tensor:
        """The gathered indices: (ranks, indices). Raises as :meth:`agree`."""
        if gathered.numel() % ranks:
            raise disagreement()
        messages = gathered.view(ranks, -1)
        digests = messages[:, : self._digest_length]
        self.agreement.note((digests != digests[0]).any())
        if self.idle.finds:
            self.idle.found((messages[:, self._digest_length : self.head] != 0).any(0))
        return messages[:, self.head :]
