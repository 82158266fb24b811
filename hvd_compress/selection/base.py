"""Which entries of a bucket are sent, and who decides.

Slots (see :mod:`~hvd_compress.reference`) are either led, or shared, or all there are:

- :class:`BlockSelection`, :class:`TopkSelection`: dealt to the ranks in runs of ``run``, in an order of ranks that is
  drawn anew each step, so that every rank leads the same number of slots and each slot's leader is random. One
  allgather of picks gives every rank the same list.
- :class:`SharedSelection`: from scores that all ranks hold alike, without a message.
- :class:`Everything`: density 1.
"""

import abc
import math
import zlib
from collections.abc import Generator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from .. import ops, reference
from ..engine.agreement import MARKS, alike, disagreement
from ..engine.bucket import Bucket, Segment
from ..engine.collectives import Request, allgather
from ..engine.deferred import Due, without
from ..reference import BLOCK
from ..engine.rng import derive, permutation

Agreement = Generator[Request, Tensor, None]


@dataclass
class Turn:
    """What all ranks draw alike for one bucket's step: the key of its randomness and who stands where."""

    step: int
    key: int
    order: list[int]
    #: A hash of the method's options.
    settings: int

    @classmethod
    def draw(cls, seed: int, step: int, bucket: int, ranks: int, settings: int) -> "Turn":
        key = derive(seed, step, bucket)
        return cls(step, key, permutation(key, ranks), settings)

    @property
    def phase(self) -> int:
        return self.key & 0xFFFF


@dataclass(frozen=True)
class Rule:
    """How entries are scored: |residual| / (|weight| + floor), or |residual| where ``floors`` is None.

    ``floors``: float32, (segments,). ``explore``: the share of random picks. ``scale`` of incoming gradients,
    ``momentum``, and the flag for gradients that are not finite (int32, (1,)). ``unlike``: set where the ranks chose
    differently, until somebody looks (bool, (1,)). ``means``: where the blocks' means go instead of to their entries
    (float32, (blocks,) of the bucket), or None.
    """

    floors: Tensor | None
    explore: float
    scale: float
    momentum: float
    invalid: Tensor
    unlike: Tensor
    means: Tensor | None = None

    @property
    def threshold(self) -> int:
        return int(self.explore * 2**32)

    def score(self, bucket: Bucket, position: int) -> Tensor:
        """Of a segment's entries, in memory order: float32, (entries,)."""
        segment = bucket.segments[position]
        magnitude = segment.of(bucket.residual)[: segment.numel].abs()
        if self.floors is None:
            return magnitude
        weight = segment.parameter.detach().as_strided((segment.numel,), (1,)).float().abs()
        return magnitude / (weight + self.floors[position])


@dataclass(frozen=True)
class Averages:
    """What comes back of a step's values: their ``mean`` over ranks and what this rank ``lost`` on the way (float32,
    (slots,)); gradients get the mean times ``scale``. ``block_means``: what every entry of a block gets beside it
    (float32, (blocks,)), or None; of leaders' selections and of :class:`Everything` only."""

    mean: Tensor
    lost: Tensor
    scale: float
    block_means: Tensor | None = None


def missing(targets: list[Tensor]) -> list[int]:
    """The segments that have no target: no gradient came to be assigned to."""
    return [position for position, target in enumerate(targets) if not target.numel()]


class Selection(abc.ABC):
    """One bucket's entries of this step. ``slots[i]`` are those of segment i."""

    def __init__(self, bucket: Bucket, slots: list[int]) -> None:
        self.bucket, self.slots = bucket, slots
        self.total = sum(slots)
        self.first = list(accumulate(slots[:-1], initial=0))
        self._no_floor = torch.zeros(1, device=bucket.device)
        #: Where :meth:`take` puts them: float32, (slots,), memory of its owner.
        self.values: Tensor

    def span(self, position: int) -> slice:
        """A segment's slots."""
        return slice(self.first[position], self.first[position] + self.slots[position])

    def begin(self, turn: Turn, check: bool) -> None:
        """A new step. ``check``: whether to find out if all ranks are in the same one (a look at the result: it waits
        for a GPU)."""
        self.turn, self.check, self.phase = turn, check, turn.phase

    def receive(self, position: int, grad: Tensor, velocity: Tensor | None, rule: Rule) -> None:
        """A segment's gradient goes into the residual, and becomes zero unless :meth:`put` writes all of it."""
        self._accumulate(position, grad, velocity, rule, 0, grad.new_empty(0, dtype=torch.uint8))

    def agree(self, rule: Rule) -> Agreement:
        """An exchange that ends with the same entries on every rank."""
        yield from ()

    @abc.abstractmethod
    def take(self, memory: Tensor) -> Tensor:
        """The entries' values in a bucket-wide tensor: float32, (slots,), memory of the selection."""

    @abc.abstractmethod
    def put(self, targets: list[Tensor], velocity: Tensor | None, averages: Averages) -> None:
        """See :func:`hvd_compress.reference.put`; ``targets``: one a segment, to be assigned to, or empty. What is to
        be done to the residual and the bucket's ``velocity`` may be left :mod:`~hvd_compress.due`."""

    def spare(self, targets: list[Tensor], mean: Tensor) -> Tensor:
        """``mean`` for :meth:`put`, not finite where a segment has no target: what nobody receives must stay in the
        residual. (Horovod asks all ranks for the same gradients, so it has none on any of them.)"""
        return without(mean, map(self.span, missing(targets)))

    def _accumulate(
        self,
        position: int,
        grad: Tensor,
        velocity: Tensor | None,
        rule: Rule,
        slots: int,
        picks: Tensor,
        run: int = 1,
        ranks: int = 1,
        place: int = 0,
    ) -> None:
        segment = self.bucket.segments[position]
        weighted = rule.floors is not None
        due = self.bucket.due
        ops.accumulate_select(
            grad,
            segment.of(self.bucket.state["residual"]),
            segment.parameter.detach() if weighted else None,
            None if velocity is None else segment.of(velocity),
            self._no_floor if rule.floors is None else rule.floors[position : position + 1],
            picks,
            rule.invalid,
            None if rule.means is None else segment.of_blocks(rule.means),
            rule.scale,
            rule.momentum,
            slots,
            self.first[position],
            self.phase,
            run,
            ranks,
            place,
            self.key(position),
            rule.threshold,
            *(() if due is None else due.of(position)),
        )
        if due is not None:
            due.done(position)

    def stamp(self) -> int:
        """A hash of 32 bits of what must be the same on all ranks."""
        return zlib.crc32(repr((self.turn.key, self.turn.step, self.turn.settings, self.slots)).encode())

    def key(self, position: int) -> int:
        """Of a segment's randomness in this step."""
        return int(reference.mix(position, self.turn.key))


def _rows(parts: list["Part"], slots: list[int], first: list[int], device: torch.device) -> Tensor:
    """The operators' table: first block, blocks, first slot, slots of every segment."""
    rows = [(p.first, p.blocks, first[i], slots[i]) for i, p in enumerate(parts)]
    return torch.tensor(rows, dtype=torch.int64, device=device)


class Led(Selection):
    """Leaders pick. ``run`` is how many slots a leader picks in a row."""

    #: dtype of a pick on the wire.
    dtype: torch.dtype

    def __init__(self, bucket: Bucket, slots: list[int], run: int, ranks: int, rank: int) -> None:
        super().__init__(bucket, slots)
        self.run, self.ranks, self.rank = run, ranks, rank
        self.segments = _rows([whole(s) for s in bucket.segments], slots, self.first, bucket.device)
        mine = -(-self.total // (run * ranks)) * run
        self.head = 4 // self.dtype.itemsize
        #: What the allgather carries: four bytes that must be the same on all ranks, then this rank's picks.
        self.plane = torch.zeros(self.head + mine, dtype=self.dtype, device=bucket.device)
        self.own = self.plane[self.head :]

    def begin(self, turn: Turn, check: bool) -> None:
        super().begin(turn, check)
        self.position = turn.order.index(self.rank)
        # In every step: another rank may look in one in which this one does not.
        self.plane[: self.head].view(torch.int32).fill_(self.stamp() & 0x7FFFFFFF)

    def choose(self, rule: Rule) -> None:
        """The last chance to fill ``own``, with the whole residual at hand."""

    def agree(self, rule: Rule) -> Agreement:
        self.choose(rule)
        gathered = yield allgather(self.plane, "indices")
        self.picks = self.in_slot_order(gathered, rule)

    def picks_by_rank(self, gathered: Tensor, ranks: int, rule: Rule) -> Tensor:
        """What the allgather lined up, a row for each of ``ranks``, without the four bytes.

        Raises ``RuntimeError``, on every rank alike, where the ranks do not draw from the same seed and step.
        """
        if gathered.numel() % ranks:
            raise disagreement()
        planes = gathered.view(ranks, -1)
        rule.unlike.logical_or_((planes[:, : self.head] != planes[0, : self.head]).any())
        if self.check and bool(rule.unlike):
            raise disagreement()
        return planes[:, self.head :]

    def in_slot_order(self, gathered: Tensor, rule: Rule) -> Tensor:
        """All ranks' picks in the order of the slots; raises as :meth:`picks_by_rank` does."""
        by_rank = self.picks_by_rank(gathered, self.ranks, rule).view(self.ranks, -1, self.run)
        # Not by an index tensor: on its way to a GPU it would wait for all that is queued there.
        return torch.stack([by_rank[rank] for rank in self.turn.order], dim=1).view(-1)[: self.total]


class BlockSelection(Led):
    """m of every 256: picks are offsets in a block, one byte each, made while the gradient is in the cache."""

    dtype = torch.uint8

    def receive(self, position: int, grad: Tensor, velocity: Tensor | None, rule: Rule) -> None:
        slots = self.slots[position]
        self._accumulate(position, grad, velocity, rule, slots, self.own, self.run, self.ranks, self.position)

    def take(self, memory: Tensor) -> Tensor:
        ops.take(memory, self.picks, self.segments, self.values, self.phase)
        return self.values

    def put(self, targets: list[Tensor], velocity: Tensor | None, averages: Averages) -> None:
        self.bucket.forget_due()
        a, residual, rows = averages, self.bucket.state["residual"], self.segments
        ops.put(targets, residual, None, self.picks, rows, a.mean, None, self.phase, a.scale, a.block_means)
        spans = [self.span(position) for position in range(len(self.slots))]
        self.bucket.due = Due(self.picks, rows, spans, self.phase, a.mean, a.lost)


class TopkSelection(Led):
    """Exact: every leader picks its share of a whole parameter's entries, the largest scores. Four bytes a pick.

    The oracle for :class:`BlockSelection`, in plain torch: slow and without an upper bound on how far it looks.
    """

    dtype = torch.int32

    def __init__(self, bucket: Bucket, slots: list[int], run: int, ranks: int, rank: int) -> None:
        super().__init__(bucket, slots, run, ranks, rank)
        # Only the host reads it, in every step: a GPU would be waited for.
        self.segments = self.segments.cpu()

    def choose(self, rule: Rule) -> None:
        for position, segment in enumerate(self.bucket.segments):
            edges = torch.tensor([self.first[position], self.first[position] + self.slots[position]])
            low, high = reference.owned(edges, self.run, self.ranks, self.position).tolist()
            score = rule.score(self.bucket, position)
            random = round((high - low) * rule.explore)
            best = self.largest(position, score, high - low - random)
            if random:
                score[best] = -1.0
                noise = reference.mix(torch.arange(segment.numel, device=score.device), self.key(position))
                assert isinstance(noise, Tensor)
                best = torch.cat([best, (score / reference.exponential(noise)).topk(random).indices])
            picked = best.sort().values + segment.first_block * BLOCK
            self.own[low:high] = picked.to(torch.int32)

    def largest(self, position: int, score: Tensor, count: int) -> Tensor:
        """Where the ``count`` largest scores of a segment are: int64, (count,)."""
        return score.topk(count).indices

    def take(self, memory: Tensor) -> Tensor:
        return torch.index_select(memory, 0, self.picks, out=self.values)

    def put(self, targets: list[Tensor], velocity: Tensor | None, averages: Averages) -> None:
        a, residual, where = averages, self.bucket.residual, self.picks.long()
        reference.put_at(targets, residual, velocity, where, self.segments, a.mean, a.lost, a.scale, a.block_means)


class Unled(Selection):
    """The same entries on all ranks without a leader, and every entry at most once."""

    #: Whether only half of the entries have their turn in a step.
    halves = False

    def agree(self, rule: Rule) -> Agreement:
        """No message of this selection would show that the ranks choose differently, so they compare hashes. In every
        step: if only some ranks knew when to compare, the others would wait for ever."""
        same = yield from alike(self.fingerprint())
        rule.unlike.logical_or_(~same)
        if self.check and bool(rule.unlike):
            raise disagreement()

    def fingerprint(self) -> Tensor:
        """Of what all ranks must choose alike: int64, (1,), below ``MARKS``."""
        return torch.full((1,), self.stamp() % MARKS, device=self.bucket.device)

    @abc.abstractmethod
    def turns(self) -> list["Part"]:
        """Whose turn it is: the part of each segment that may be sent."""

    @abc.abstractmethod
    def read(self, memory: Tensor) -> Tensor:
        """As :meth:`take`, in memory of its own."""

    @abc.abstractmethod
    def write(self, memory: Tensor, values: Tensor) -> None:
        """The inverse of :meth:`read`."""


class Everything(Unled):
    """Every entry, padding included: no indices are needed, and nothing waits."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket, [segment.blocks * BLOCK for segment in bucket.segments])

    def turns(self) -> list["Part"]:
        return [whole(segment) for segment in self.bucket.segments]

    def take(self, memory: Tensor) -> Tensor:
        return self.values.copy_(memory)

    def put(self, targets: list[Tensor], velocity: Tensor | None, averages: Averages) -> None:
        # The velocity goes on as in plain momentum: nothing was held back.
        residual, mean = self.bucket.residual, averages.mean
        residual.copy_(torch.where(mean.isfinite(), averages.lost, residual))
        if averages.block_means is not None:
            mean = mean + averages.block_means.repeat_interleave(BLOCK)
        for segment, target in zip(self.bucket.segments, targets, strict=True):
            if target.numel():
                flat = target.as_strided((target.numel(),), (1,))
                flat.copy_(segment.of(mean)[: target.numel()] * averages.scale)

    def read(self, memory: Tensor) -> Tensor:
        return memory.clone()

    def write(self, memory: Tensor, values: Tensor) -> None:
        memory.copy_(values)


class SharedSelection(Unled):
    """m of every 256 by scores that are equal on all ranks; with ``halves``, in that half of every parameter whose turn
    it is: its first or its last blocks. A single block is always its own half."""

    def __init__(self, bucket: Bucket, slots: list[int], halves: bool) -> None:
        super().__init__(bucket, slots)
        self.halves = halves
        # Made here and not in each step: a GPU would be waited for.
        self.turn_parts = [self._parts_of(whose) for whose in range(2 if halves else 1)]
        self.turn_rows = [_rows(parts, slots, self.first, bucket.device) for parts in self.turn_parts]

    def _parts_of(self, whose: int) -> list["Part"]:
        segments = enumerate(self.bucket.segments)
        return [half(s, (whose + i) % 2) if self.halves else whole(s) for i, s in segments]

    def begin(self, turn: Turn, check: bool) -> None:
        super().begin(turn, check)
        whose = turn.step % len(self.turn_parts)
        self.parts, self.rows = self.turn_parts[whose], self.turn_rows[whose]
        self.picks = torch.zeros(self.total, dtype=torch.uint8, device=self.bucket.device)

    def fingerprint(self) -> Tensor:
        place = torch.arange(self.total, device=self.bucket.device) % 4093 + 1
        return (super().fingerprint() + (self.picks * place).sum()) % MARKS

    def turns(self) -> list["Part"]:
        return self.parts

    def pick(self, position: int, score: Tensor, explore: float) -> None:
        """A segment's picks, by the ``score`` of those entries whose turn it is: float32, (entries,)."""
        slots, first, key = self.slots[position], self.first[position], self.key(position)
        score = torch.nn.functional.pad(score, (0, self.parts[position].blocks * BLOCK - score.numel()))
        ops.select(score, self.picks, slots, first, self.phase, 1, 1, 0, key, int(explore * 2**32))

    def take(self, memory: Tensor) -> Tensor:
        ops.take(memory, self.picks, self.rows, self.values, self.phase)
        return self.values

    def put(self, targets: list[Tensor], velocity: Tensor | None, averages: Averages) -> None:
        parts = [p.of(target) if target.numel() else target for p, target in zip(self.parts, targets, strict=True)]
        a, residual = averages, self.bucket.residual
        ops.put(parts, residual, velocity, self.picks, self.rows, a.mean, a.lost, self.phase, a.scale)

    def read(self, memory: Tensor) -> Tensor:
        values = torch.empty(self.total, device=memory.device)
        ops.take(memory, self.picks, self.rows, values, self.phase)
        return values

    def write(self, memory: Tensor, values: Tensor) -> None:
        # As what is left in a residual.
        nowhere = [values.new_empty(0)] * len(self.parts)
        ops.put(nowhere, memory, None, self.picks, self.rows, values, values, self.phase, 0.0)


class Rotating(Unled):
    """Every ``period``-th entry of each parameter, so that all have had their turn after ``period`` steps."""

    def __init__(self, bucket: Bucket, period: int) -> None:
        super().__init__(bucket, [-(-segment.numel // period) for segment in bucket.segments])
        self.period = period

    def turns(self) -> list["Part"]:
        return [whole(segment) for segment in self.bucket.segments]

    def parts(self, memory: Tensor) -> list[Tensor]:
        """Views of the entries whose turn it is in a bucket-wide tensor, segment by segment."""
        return [self._of(segment.of(memory)[: segment.numel], i) for i, segment in enumerate(self.bucket.segments)]

    def _of(self, flat: Tensor, position: int) -> Tensor:
        return flat[(self.turn.step + position) % self.period :: self.period]

    def _into(self, values: Tensor, memory: Tensor) -> Tensor:
        # Some offsets have one entry less than there are slots.
        values.zero_()
        for part, first in zip(self.parts(memory), self.first, strict=True):
            values[first : first + part.numel()] = part
        return values

    def take(self, memory: Tensor) -> Tensor:
        return self._into(self.values, memory)

    def read(self, memory: Tensor) -> Tensor:
        return self._into(torch.empty(self.total, device=memory.device), memory)

    def write(self, memory: Tensor, values: Tensor) -> None:
        for part, first in zip(self.parts(memory), self.first, strict=True):
            part.copy_(values[first : first + part.numel()])

    def put(self, targets: list[Tensor], velocity: Tensor | None, averages: Averages) -> None:
        mean, residual = averages.mean, self.bucket.residual
        self.write(residual, torch.where(mean.isfinite(), averages.lost, self.read(residual)))
        # The velocity goes on: all entries wait equally long, and cleared every period it would never get up to speed.
        for position, (target, first) in enumerate(zip(targets, self.first, strict=True)):
            if target.numel():
                here = self._of(target.as_strided((target.numel(),), (1,)), position)
                here.copy_(mean[first : first + here.numel()] * averages.scale)


@dataclass(frozen=True)
class Part:
    """Some blocks of a segment: ``first`` counts in the bucket, ``skipped`` in the segment."""

    first: int
    skipped: int
    blocks: int

    def of(self, target: Tensor) -> Tensor:
        """Its entries in a tensor of the whole segment, in memory order, flat; the last may lack padding."""
        begin, end = self.skipped * BLOCK, (self.skipped + self.blocks) * BLOCK
        return target.as_strided((target.numel(),), (1,))[begin:end]

    def of_bucket(self, flat: Tensor) -> Tensor:
        """Its entries in a bucket-wide tensor, padding included."""
        return flat[self.first * BLOCK : (self.first + self.blocks) * BLOCK]


def whole(segment: Segment) -> Part:
    """All of it."""
    return Part(segment.first_block, 0, segment.blocks)


def half(segment: Segment, turn: int) -> Part:
    """The first (0) or the last (1) half of a segment's blocks."""
    early = segment.blocks // 2
    if not early:
        return whole(segment)
    if turn:
        return Part(segment.first_block + early, early, segment.blocks - early)
    return Part(segment.first_block, 0, early)


def smaller_half(segment: Segment) -> int:
    """Entries of the half that has fewer."""
    early = segment.blocks // 2 * BLOCK
    return min(early, segment.numel - early) if early else segment.numel


LED: dict[str, type[Led]] = {"block": BlockSelection, "topk": TopkSelection}


def run_length(leaders: int | None, density: float, ranks: int) -> int:
    """How many slots a leader picks in a row, so that ``leaders`` (None: all ranks) share a block's on average."""
    return 1 if leaders is None else max(1, math.ceil(density * BLOCK / min(leaders, ranks)))


def check_leaders(leaders: int | None) -> None:
    """Raises ``ValueError``."""
    if leaders is not None and leaders < 1:
        raise ValueError(f"leaders must be at least 1, or None for all ranks, got {leaders}")


def check_explore(explore: float) -> None:
    """Raises ``ValueError``."""
    if not 0.0 <= explore <= 1.0:
        raise ValueError(f"explore must lie in [0, 1], got {explore}")


def leaders_text(leaders: int | None) -> str:
    """For a ``__repr__``."""
    return "all ranks lead" if leaders is None else f"{leaders} random leader(s) a block"
