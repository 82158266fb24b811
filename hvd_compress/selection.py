"""Which entries of a bucket are sent, and who decides: one allgather of picks gives every rank the same list.

Slots (see :mod:`~hvd_compress.reference`) are dealt to the ranks in runs of ``run``, in an order of ranks that is drawn
anew each step, so that every rank leads the same number of slots and each slot's leader is random.
"""

import abc
import zlib
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from . import ops, reference
from .bucket import Bucket, Segment
from .reference import BLOCK
from .rng import derive, permutation


@dataclass
class Turn:
    """What all ranks draw alike for one bucket's step: the key of its randomness and who stands where."""

    key: int
    order: list[int]

    @classmethod
    def draw(cls, seed: int, step: int, bucket: int, ranks: int) -> "Turn":
        key = derive(seed, step, bucket)
        return cls(key, permutation(key, ranks))


class Selection(abc.ABC):
    """One bucket's picks. ``slots[i]`` are those of segment i; ``run`` is how many a leader picks in a row."""

    #: dtype of a pick on the wire.
    dtype: torch.dtype
    #: Whether a parameter's picks are made as its gradient comes, while it is in the cache, or by :meth:`choose`.
    at_once: bool

    def __init__(self, bucket: Bucket, slots: list[int], run: int, ranks: int, rank: int) -> None:
        self.bucket, self.slots, self.run, self.ranks, self.rank = bucket, slots, run, ranks, rank
        self.total = sum(slots)
        self.first = list(accumulate(slots[:-1], initial=0))
        self.segments = torch.tensor(
            [(s.first_block, s.blocks, self.first[i], slots[i]) for i, s in enumerate(bucket.segments)],
            dtype=torch.int64,
            device=bucket.device,
        )
        mine = -(-self.total // (run * ranks)) * run
        self.head = 4 // self.dtype.itemsize
        #: What the allgather carries: four bytes that must be the same on all ranks, then this rank's picks.
        self.plane = torch.zeros(self.head + mine, dtype=self.dtype, device=bucket.device)
        self.picks = self.plane[self.head :]

    def begin(self, turn: Turn, check: bool) -> None:
        """A new step. ``check``: whether to find out if all ranks are in the same one (a look at the result: it waits
        for a GPU)."""
        self.turn, self.check = turn, check
        self.position = turn.order.index(self.rank)
        if check:
            stamp = zlib.crc32(repr((turn.key, self.run, self.slots)).encode()) & 0x7FFFFFFF
            self.plane[: self.head].view(torch.int32).fill_(stamp)

    @property
    def phase(self) -> int:
        return self.turn.key & 0xFFFF

    def in_slot_order(self, gathered: Tensor) -> Tensor:
        """All ranks' picks, as the allgather lined them up by rank, put into the order of the slots.

        Raises ``RuntimeError``, on every rank alike, where the ranks do not draw from the same seed and step.
        """
        planes = gathered.view(self.ranks, -1)
        if self.check and not bool((planes[:, : self.head] == planes[0, : self.head]).all()):
            raise RuntimeError(
                "the ranks' compressors disagree: seed, density, leaders and step must be the same on all (was a state "
                "loaded on some ranks only? was the seed made from the rank?)"
            )
        by_rank = planes[:, self.head :].reshape(self.ranks, -1, self.run)
        order = torch.tensor(self.turn.order, device=gathered.device)
        return by_rank.index_select(0, order).transpose(0, 1).reshape(-1)[: self.total]

    def receive(self, position: int, grad: Tensor, velocity: Tensor | None, rule: "Rule", select: bool) -> None:
        """A segment's gradient goes into the residual, and its picks are made (if ``select``, and :attr:`at_once`)."""
        segment = self.bucket.segments[position]
        early = select and self.at_once
        ops.accumulate_select(
            grad,
            segment.of(self.bucket.residual),
            segment.parameter.detach(),
            None if velocity is None else segment.of(velocity),
            rule.floors[position : position + 1],
            self.picks if early else self.picks.new_empty(0, dtype=torch.uint8),
            rule.invalid,
            rule.scale,
            rule.momentum,
            self.slots[position] if early else 0,
            self.first[position],
            self.phase,
            self.run,
            self.ranks,
            self.position,
            int(reference.mix(position, self.turn.key)),
            rule.threshold,
        )

    def choose(self, rule: "Rule") -> None:
        """The last chance to fill ``picks``, with the whole residual at hand."""

    @abc.abstractmethod
    def take(self, picks: Tensor, velocity: Tensor | None, invalid: Tensor, payload: Tensor, limit: float) -> None:
        """See :func:`hvd_compress.reference.take`; ``picks`` are all slots', in slot order."""

    @abc.abstractmethod
    def put(self, picks: Tensor, total: Tensor, sent: Tensor, scale: float) -> None:
        """See :func:`hvd_compress.reference.put`."""

    def gradients(self) -> list[Tensor]:
        empty = torch.empty(0, device=self.bucket.device)
        return [empty if grad is None else grad for grad in self.bucket.gradients]


@dataclass(frozen=True)
class Rule:
    """How entries are scored: ``floors`` (float32, (segments,)) under the weights, the share ``explore`` of random
    picks, ``scale`` of incoming gradients, ``momentum``, and the flag for gradients that are not finite (int32,
    (1,))."""

    floors: Tensor
    explore: float
    scale: float
    momentum: float
    invalid: Tensor

    @property
    def threshold(self) -> int:
        return int(self.explore * 2**32)


def importance(bucket: Bucket, segment: Segment, floor: Tensor) -> Tensor:
    """|residual| / (|weight| + floor) of a segment's entries, in memory order: float32, (entries,)."""
    weight = segment.parameter.detach().as_strided((segment.numel,), (1,)).float().abs()
    return segment.of(bucket.residual)[: segment.numel].abs() / (weight + floor)


class BlockSelection(Selection):
    """m of every 256: picks are offsets in a block, one byte each, made while the gradient is in the cache."""

    dtype = torch.uint8
    at_once = True

    def take(self, picks: Tensor, velocity: Tensor | None, invalid: Tensor, payload: Tensor, limit: float) -> None:
        ops.take(self.bucket.residual, velocity, picks, self.segments, invalid, payload, self.phase, limit)

    def put(self, picks: Tensor, total: Tensor, sent: Tensor, scale: float) -> None:
        ops.put(self.gradients(), self.bucket.residual, picks, self.segments, total, sent, self.phase, scale)


class TopkSelection(Selection):
    """Exact: every leader picks its share of a whole parameter's entries, the largest scores. Four bytes a pick.

    The oracle for :class:`BlockSelection`, in plain torch: slow and without an upper bound on how far it looks.
    """

    dtype = torch.int32
    at_once = False

    def choose(self, rule: Rule) -> None:
        for position, segment in enumerate(self.bucket.segments):
            edges = torch.tensor([self.first[position], self.first[position] + self.slots[position]])
            low, high = reference.owned(edges, self.run, self.ranks, self.position).tolist()
            score = importance(self.bucket, segment, rule.floors[position])
            random = round((high - low) * rule.explore)
            best = score.topk(high - low - random).indices
            score[best] = -1.0
            noise = reference.mix(
                torch.arange(segment.numel, device=score.device), int(reference.mix(position, self.turn.key))
            )
            assert isinstance(noise, Tensor)
            lucky = (score / reference.exponential(noise)).topk(random).indices
            picked = torch.cat([best, lucky]).sort().values + segment.first_block * BLOCK
            self.picks[low:high] = picked.to(torch.int32)

    def take(self, picks: Tensor, velocity: Tensor | None, invalid: Tensor, payload: Tensor, limit: float) -> None:
        reference.take_at(self.bucket.residual, velocity, picks.long(), invalid, payload, limit)

    def put(self, picks: Tensor, total: Tensor, sent: Tensor, scale: float) -> None:
        reference.put_at(self.gradients(), self.bucket.residual, picks.long(), self.segments, total, sent, scale)


SELECTIONS: dict[str, type[Selection]] = {"block": BlockSelection, "topk": TopkSelection}
