"""Which entries of a bucket are sent in a step: the interface of a selection, and what all selections share.

A *slot* is one value that will be sent. :mod:`.leaders`: ranks drawn at random select, one allgather of indices.
:mod:`.shared`: every rank computes the same entries from shared state, no indices are sent. :mod:`.per_rank`: each rank
selects and sends its own entries.
"""

import abc
import zlib
from collections.abc import Generator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from .. import ops, reference
from ..engine.bucket import Bucket, Segment
from ..engine.collectives import Request
from ..engine.deferred import NOT_DEFERRED, with_nan
from ..engine.rng import derive, permutation
from ..reference import BLOCK

Agreement = Generator[Request, Tensor, None]


@dataclass
class StepSeed:
    """Randomness of one bucket's step, the same on all ranks.

    ``key``: of the random numbers. ``order``: a random permutation of the ranks. ``settings``: a hash of the method's
    options, which must be the same on all ranks.
    """

    step: int
    key: int
    order: list[int]
    settings: int

    @classmethod
    def draw(cls, seed: int, step: int, bucket: int, ranks: int, settings: int) -> "StepSeed":
        key = derive(seed, step, bucket)
        return cls(step, key, permutation(key, ranks), settings)

    @property
    def phase(self) -> int:
        """Rotates which blocks get the slots that do not divide evenly."""
        return self.key & 0xFFFF


@dataclass(frozen=True)
class Scoring:
    """How gradients enter the residual, and how its entries are scored: |residual| / (|weight| + floor), or |residual|
    if ``floors`` is None.

    ``floors``: float32, (segments,). ``explore``: the share of blocks in which entries are drawn at random. ``scale``:
    factor of incoming gradients. ``momentum``: of momentum correction. ``invalid``: int32, (1,), set if a gradient is
    not finite. ``disagree``: bool, (1,), set if ranks have selected differently. ``block_means``: float32, (blocks,),
    to which the blocks' means are added, or None. ``decay``: the residual's factor. ``transform``: the residual holds
    Walsh-Hadamard coefficients (:func:`hvd_compress.reference.hadamard`).
    """

    floors: Tensor | None
    explore: float
    scale: float
    momentum: float
    invalid: Tensor
    disagree: Tensor
    block_means: Tensor | None = None
    decay: float = 1.0
    transform: bool = False

    def score(self, bucket: Bucket, position: int) -> Tensor:
        """The scores of a segment's entries, in memory order: float32, (entries,)."""
        segment = bucket.segments[position]
        magnitude = segment.of(bucket.residual)[: segment.numel].abs()
        if self.floors is None:
            return magnitude
        return magnitude / (segment.flat_weight().float().abs() + self.floors[position])


@dataclass(frozen=True)
class Output:
    """How averages become gradients.

    ``scale``: their factor. ``transform``: averages are Walsh-Hadamard coefficients
    (:func:`hvd_compress.reference.hadamard`), of which gradients are the inverse transform. ``sign``: the transform's
    result is replaced by its sign.
    """

    scale: float
    transform: bool = False
    sign: bool = False

    def write(self, bucket: Bucket, mean: Tensor, targets: list[Tensor]) -> None:
        """Writes averages of a whole bucket, float32, (blocks * 256,), to ``targets`` (one tensor per segment, or
        empty). Overwrites ``mean``."""
        if self.transform:
            ops.hadamard(mean)
            if self.sign:
                mean = signs(mean)
        for segment, target in zip(bucket.segments, targets, strict=True):
            if target.numel():
                flat = target.as_strided((target.numel(),), (1,))
                flat.copy_(segment.of(mean)[: target.numel()] * self.scale)


def signs(values: Tensor) -> Tensor:
    """Of all entries; NaN stays, which ``torch.sign`` makes 0."""
    return torch.where(values.isnan(), values, values.sign())


@dataclass(frozen=True)
class Average:
    """The result of an exchange.

    ``mean``: over ranks, float32, (slots,). ``error``: this rank's quantization error, float32, (slots,).
    ``block_means``: added to every entry of a block, float32, (blocks,), or None.
    """

    mean: Tensor
    error: Tensor
    output: Output
    block_means: Tensor | None = None


def missing_targets(targets: list[Tensor]) -> list[int]:
    """The positions of segments for which no gradient arrived."""
    return [position for position, target in enumerate(targets) if not target.numel()]


class Selection(abc.ABC):
    """The entries of one bucket that are sent, of which segment i has ``slots[i]``.

    In a step: :meth:`begin_step`, :meth:`accumulate` for each gradient, :meth:`agree`, :meth:`gather`, and, after the
    exchange of the values, :meth:`scatter`.
    """

    #: Whether entries are selected as the gradients arrive, while they are in the cache.
    selects_early = False
    #: This rank selects ``run`` of every ``run * ranks`` slots, from ``run * position`` on, into ``own_indices``.
    run, ranks, position = 1, 1, 0
    own_indices: Tensor

    def __init__(self, bucket: Bucket, slots: list[int]) -> None:
        self.bucket, self.slots = bucket, slots
        self.total = sum(slots)
        self.first = list(accumulate(slots[:-1], initial=0))
        self._no_floor = torch.zeros(1, dtype=torch.float32, device=bucket.device)
        #: Which segments' gradients had an entry other than zero in this step: int32, (segments,).
        self.touched = torch.zeros(len(slots), dtype=torch.int32, device=bucket.device)
        self._touched = torch.split(self.touched, 1)
        #: Whether :meth:`agree` finds out which segments no rank has a gradient for, and those: bool, (segments,), or
        #: None if there are none.
        self.finds_idle = False
        self.idle: Tensor | None = None
        self._no_indices = torch.zeros(0, dtype=torch.uint8, device=bucket.device)
        #: Where :meth:`gather` writes: float32, (slots,). Set by the method.
        self.values: Tensor

    def span(self, position: int) -> slice:
        """The slots of a segment."""
        return slice(self.first[position], self.first[position] + self.slots[position])

    def begin_step(self, seed: StepSeed, check: bool) -> None:
        """``check``: raise an error in this step if ranks have selected differently (synchronises a GPU)."""
        self.seed, self.check, self.phase = seed, check, seed.phase
        self.touched.zero_()

    def agree(self, scoring: Scoring) -> Agreement:
        """An exchange after which all ranks know the same entries."""
        yield from ()

    @abc.abstractmethod
    def gather(self, memory: Tensor) -> Tensor:
        """The selected entries of a bucket-wide tensor, in ``values``: float32, (slots,)."""

    @abc.abstractmethod
    def scatter(self, targets: list[Tensor], velocity: Tensor | None, average: Average) -> None:
        """Writes an average to ``targets`` (one tensor per segment, or empty), and the quantization error to the
        residual; see :func:`hvd_compress.reference.scatter`. The update of residual and velocity may be deferred."""

    def find_idle(self, touched: Tensor) -> None:
        """``touched``: bool, (segments,), whether any rank has a gradient."""
        idle = ~touched
        # Free on the CPU; a GPU would be synchronised.
        self.idle = idle if idle.is_cuda or bool(idle.any()) else None

    def keep_idle(self, mean: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
        """An average and this rank's quantization error such that idle segments receive 0 and keep what they hold: what
        replaces gradients by signs would apply the rest of the residual for ever, however small."""
        if self.idle is None:
            return mean, error
        idle = self.idle.repeat_interleave(self._slot_counts, output_size=self.total)
        return mean.masked_fill(idle, 0.0), torch.where(idle, self.values, error)

    def silence_idle(self, mean: Tensor) -> Tensor:
        """A bucket-wide average, float32, (blocks * 256,), with 0 in idle segments."""
        if self.idle is None:
            return mean
        idle = self.idle.repeat_interleave(self._block_counts, output_size=self.bucket.blocks)
        return mean.view(-1, BLOCK).masked_fill(idle[:, None], 0.0).view(-1)

    # Made once: creating them in each step would synchronise a GPU.

    @cached_property
    def _slot_counts(self) -> Tensor:
        return torch.tensor(self.slots, dtype=torch.int64, device=self.bucket.device)

    @cached_property
    def _block_counts(self) -> Tensor:
        return torch.tensor(
            [segment.blocks for segment in self.bucket.segments], dtype=torch.int64, device=self.bucket.device
        )

    def skip_missing(self, targets: list[Tensor], mean: Tensor) -> Tensor:
        """``mean`` with NaN where a segment has no target: values that nobody receives stay in the residual. (Hosts
        pass the same parameters on all ranks, so the target is missing on all of them.)"""
        return with_nan(mean, map(self.span, missing_targets(targets)))

    def accumulate(self, position: int, grad: Tensor, velocity: Tensor | None, scoring: Scoring) -> None:
        """Adds a segment's gradient to the residual, and selects this rank's entries if ``selects_early``. Zeroes the
        gradient unless :meth:`scatter` writes all of it."""
        segment, deferred, floors = self.bucket.segments[position], self.bucket.deferred, scoring.floors
        given, weight = grad, None if floors is None else segment.parameter.detach()
        if weight is not None and weight.dtype != grad.dtype:
            grad, weight = grad.float(), weight.float()
        ops.accumulate_select(
            grad,
            segment.of(self.bucket.state["residual"]),
            weight,
            None if velocity is None else segment.of(velocity),
            self._no_floor if floors is None else floors[position : position + 1],
            self.own_indices if self.selects_early else self._no_indices,
            scoring.invalid,
            self._touched[position],
            None if scoring.block_means is None else segment.of_blocks(scoring.block_means),
            scoring.scale,
            scoring.momentum,
            self.slots[position] if self.selects_early else 0,
            self.first[position],
            self.phase,
            self.run,
            self.ranks,
            self.position,
            self.key(position),
            int(scoring.explore * 2**32),
            *(NOT_DEFERRED if deferred is None else deferred.arguments(position)),
            scoring.decay,
            scoring.transform,
        )
        if grad is not given:
            given.copy_(grad)  # zeros, unless scatter() writes all of it
        if deferred is not None:
            deferred.mark_applied(position)

    def digest(self) -> int:
        """A 32-bit hash of what must be the same on all ranks."""
        seed = self.seed
        return zlib.crc32(repr((seed.key, seed.step, seed.settings, self.slots)).encode())

    def key(self, position: int) -> int:
        """The key of a segment's random numbers in this step."""
        return int(reference.mix(position, self.seed.key))


@dataclass(frozen=True)
class BlockRange:
    """Consecutive blocks of a segment: ``first`` counts in the bucket, ``skipped`` in the segment."""

    first: int
    skipped: int
    blocks: int

    def of(self, target: Tensor) -> Tensor:
        """Its entries in a tensor of the whole segment, in memory order: a view, without padding."""
        begin, end = self.skipped * BLOCK, (self.skipped + self.blocks) * BLOCK
        return target.as_strided((target.numel(),), (1,))[begin:end]

    def of_bucket(self, flat: Tensor) -> Tensor:
        """Its entries in a bucket-wide tensor: a view, with padding."""
        return flat[self.first * BLOCK : (self.first + self.blocks) * BLOCK]


def whole(segment: Segment) -> BlockRange:
    """All blocks of a segment."""
    return BlockRange(segment.first_block, 0, segment.blocks)


def segment_table(ranges: list[BlockRange], slots: list[int], first: list[int], device: torch.device) -> Tensor:
    """The operators' table: first block, blocks, first slot, slots of every segment; int64, (segments, 4)."""
    rows = [(r.first, r.blocks, first[i], slots[i]) for i, r in enumerate(ranges)]
    return torch.tensor(rows, dtype=torch.int64, device=device)
