"""The weights that all ranks share between local steps, and each rank's own weights relative to them."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..engine.engine import Engine
from ..engine.hashes import hash_of
from ..engine.place import Place
from ..engine.shards import local, wide_zeros
from ..engine.state import Fixed, TensorLeaf, Tree
from ..engine.work import Work
from ..reference import usable

# Relative change of all weights together that is a rounding error: what is smaller is nobody's new weights.
_ROUNDING = 4 * torch.finfo(torch.float32).eps


class Average(Protocol):
    """An average that is not written out: :class:`hvd_compress.codecs.grouped_ring.Coded`."""

    def write(self, values: Tensor) -> Tensor: ...

    def square(self, count: int) -> Tensor: ...

    def times(self, factor: Tensor) -> None: ...

    def move(
        self, common: Tensor, velocity: Tensor | None, own: Tensor, before: Tensor | None, lr: float, momentum: float
    ) -> None: ...


@runtime_checkable
class LeavesCodes(Protocol):
    """A work that subtracts :attr:`Work.starts`, and need not write its averages out:
    :class:`hvd_compress.methods.coded_work.CodedWork`."""

    def square_of(self, index: int) -> Tensor: ...

    def average_of(self, index: int) -> Average: ...


@dataclass(frozen=True)
class Weight:
    """A parameter, or this rank's shard of one, and what all ranks share of it, in its shape and memory order.

    ``common``: the common weights, float32 or wider. ``velocity``: of the outer momentum, if there is any. ``place``:
    where the compressor keeps it, or None if it is not compressed. ``sums``: None if its progress is exchanged; of an
    optimizer on averaged gradients, the sums of this rank's gradients since the last exchange, which are exchanged in
    place of that: the weight moves by their averages only. ``shares``: whether its memory is another one's, too.
    """

    number: int
    name: str
    parameter: torch.nn.Parameter
    place: Place | None
    common: Tensor
    velocity: Tensor | None
    sums: Tensor | None
    shares: bool

    @property
    def own(self) -> Tensor:
        """This rank's weights: a view without gradient."""
        return local(self.parameter).detach()

    @property
    def alike(self) -> bool:
        """Whether this rank's weights lie in memory as the common ones, in the same dtype."""
        own, common = self.own, self.common
        return (own.dtype, own.stride()) == (common.dtype, common.stride())

    @property
    def in_codes(self) -> tuple[LeavesCodes, int] | None:
        """The work that has the weight and the place there, if the average may stay in codes."""
        place = self.place
        return (place.work, place.index) if place is not None and isinstance(place.work, LeavesCodes) else None

    def written(self, average: Tensor | Average) -> Tensor:
        """An average as a tensor like the common weights."""
        if isinstance(average, Tensor):
            return average
        with self.order:
            tensor = torch.empty_like(self.common)
            average.write(tensor.as_strided((tensor.numel(),), (1,)))
            return tensor

    @property
    def order(self) -> AbstractContextManager[object]:
        """The stream order of the work on it."""
        return nullcontext() if self.place is None else self.place.work.bucket.order


class CommonWeights:
    """The common weights of an engine's trained parameters, and the outer optimizer that moves them.

    Args:
        engine: of the compressor.
        unsent: ``"weights"``: the compressor's residual is a part of the rank's weights; ``"buffer"``: it is not.
        lr, momentum: of the outer optimizer, see :class:`hvd_compress.LocalSteps`.
        summed: the ids of parameters of optimizers on averaged gradients.
    """

    def __init__(self, engine: Engine, unsent: str, lr: float, momentum: float, summed: Set[int]) -> None:
        self._engine, self._unsent, self._lr, self._momentum = engine, unsent, lr, momentum
        #: Whether all ranks' weights start from the common ones.
        self.starts_common = unsent == "buffer"
        self.weights: list[Weight] = []
        memories = Counter(map(_memory, engine.parameters))
        for number, (name, p) in enumerate(zip(engine.names, engine.parameters, strict=True)):
            place = engine.place_of[number]
            if not p.requires_grad and place is None:
                continue
            if not p.is_floating_point():
                raise ValueError(f"{name}: local steps need a floating dtype, got {p.dtype}")
            sums = wide_zeros(p) if id(p) in summed else None
            common, velocity = wide_zeros(p), wide_zeros(p) if momentum and sums is None else None
            shares = memories[_memory(p)] > 1
            self.weights.append(Weight(number, name, p, place, common, velocity, sums, shares))
        self.ids = {id(weight.parameter) for weight in self.weights}
        #: Those with sums.
        self.summed = [weight for weight in self.weights if weight.sums is not None]

    def take(self, ids: Set[int], unless_rounded: bool = False) -> None:
        """Makes the parameters with these ids the common weights. They must be the same on all ranks.

        ``unless_rounded``: keeps the common weights that were taken before if the parameters differ from them by
        rounding errors only, as after SAM, which adds a step and subtracts it. Synchronises a GPU.
        """
        weights = [weight for weight in self.weights if id(weight.parameter) in ids]
        for sums in (weight.sums for weight in weights if weight.sums is not None):
            sums.zero_()
        if unless_rounded and _are_rounded(weights):
            return
        for weight in weights:
            weight.common.copy_(weight.own)
            if weight.velocity is not None:
                weight.velocity.zero_()
        self._clear_unsent()

    def replace(self, average: Iterable[Tensor]) -> None:
        """Makes the average of all ranks' weights the common weights, where usable, and the parameters; not by sums."""
        for weight, mean in zip(self.weights, average, strict=True):
            if weight.sums is not None:
                continue
            weight.common.copy_(torch.where(usable(mean), mean, weight.common))
            weight.own.copy_(mean)
        self._clear_unsent()

    def write_common(self, weights: Iterable[Weight] | None = None) -> None:
        """Makes the parameters, or those of some weights, the common weights. Of all, sums begin with 0."""
        for weight in self.weights if weights is None else weights:
            with weight.order:
                weight.own.copy_(weight.common)
        if weights is None:
            for sums in (weight.sums for weight in self.weights if weight.sums is not None):
                sums.zero_()
            self._clear_unsent()

    def stand_in(self, weights: Iterable[Weight], ends: bool = False) -> None:
        """Shows compressors that select by weights the common weights, the same on all ranks, until this ``ends``."""
        for weight in weights:
            if weight.place is not None:
                with weight.order:
                    weight.place.piece.let_stand_in(None if ends else weight.common.to(weight.own.dtype))

    def progress(self, weight: Weight, in_place: bool = False) -> Tensor:
        """How far a parameter has come since the last exchange, or its sums, which are 0 then: what the compressor gets
        as its gradient. ``in_place``: the parameter becomes that, if its dtype allows it; not by sums."""
        with weight.order:
            own, compressed = weight.own, weight.place is not None
            if weight.sums is not None:
                sums = weight.sums.to(own.dtype, copy=True)
                weight.sums.zero_()
                return sums
            if in_place and not weight.shares and (compressed or own.dtype == weight.common.dtype):
                return torch.sub(own, self.start(weight).to(own.dtype), out=own)
            return self.advance(weight).to(own.dtype) if compressed else self.advance(weight)

    def advance(self, weight: Weight) -> Tensor:
        """How far a parameter has come: in the dtype of the common weights."""
        p, wide = weight.own, weight.common.dtype
        with weight.order:
            return p.to(wide) - self.start(weight).to(p.dtype).to(wide)

    def start(self, weight: Weight) -> Tensor:
        """This rank's weights after an exchange, in the dtype of the common weights. Read only."""
        if weight.place is None or self._unsent == "buffer":
            return weight.common
        unsent: Tensor = weight.place.work.residual_of(weight.place.piece)
        return weight.common + unsent

    def move(
        self, weights: Sequence[Weight], averages: dict[str, Tensor | Average], before: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Adds averages, by name, to the common weights, through the outer optimizer. Returns what was not added:
        nothing, or the entries that are not finite, and 0 beside them. All operations are rounded by IEEE 754: the
        result is the same on all processors. Averages that are not written out make the ranks' own weights, too: the
        common ones, with the progress since those that are popped from ``before``."""
        left = dict[str, Tensor]()
        for weight in weights:
            average = averages.pop(weight.name)
            with weight.order:
                if not isinstance(average, Tensor) and weight.alike:
                    then = before.pop(weight.name, None)
                    average.move(weight.common, weight.velocity, weight.own, then, self._lr, self._momentum)
                    torch.autograd.graph.increment_version(weight.own)
                    continue
                step, left[weight.name] = parted(weight.written(average))
                if weight.velocity is not None:
                    weight.velocity.mul_(self._momentum).add_(step)
                    step = step + weight.velocity * self._momentum
                weight.common.add_(step if self._lr == 1.0 else step * self._lr)
        return left

    def applied(self) -> bool:
        """Whether the parameters are the common weights, and all sums 0. Synchronises a GPU."""
        summed = any(bool(weight.sums.any()) for weight in self.weights if weight.sums is not None)
        return not summed and all(torch.equal(w.own, w.common.to(w.own.dtype)) for w in self.weights)

    def hash(self) -> int:
        """A hash of the common weights and the outer momentum."""
        velocities = (weight.velocity for weight in self.weights if weight.velocity is not None)
        return hash_of([*(weight.common for weight in self.weights), *velocities])

    def state(self) -> dict[str, Tree]:
        """The saved state. A rank's own weights are in the model, which the user saves."""
        sums: dict[str, Tree] = {w.name: TensorLeaf(w.sums) for w in self.weights if w.sums is not None}
        return {
            **({"sums of gradients": sums} if sums else {}),
            "made_with": {"unsent": Fixed(self._unsent), "outer momentum": Fixed(bool(self._momentum))},
            "common": {w.name: TensorLeaf(w.common) for w in self.weights},
            "velocity": {w.name: TensorLeaf(w.velocity) for w in self.weights if w.velocity is not None},
        }

    def _clear_unsent(self) -> None:
        """Drops the residual: the parameters have changed and do not contain it."""
        if self._unsent == "weights":
            scale_residuals(self._engine.works, 0.0)


def _memory(parameter: Tensor) -> int:
    return local(parameter).untyped_storage().data_ptr()


def parted(average: Tensor) -> tuple[Tensor, Tensor]:
    """An average with 0 where it is not usable, and what is left of it: one 0 if all is usable, which is asked on the
    CPU only, since a GPU would be synchronised. The average must not be used any more."""
    if average.is_cpu and (not average.numel() or all(map(usable, average.aminmax()))):
        return average, average.new_zeros(())
    finite = average.masked_fill(~usable(average), 0.0)
    return finite, average.sub_(finite)


def _are_rounded(weights: Sequence[Weight]) -> bool:
    """Whether this rank's weights, all together, are the common ones but for rounding errors of float32."""
    moved = math.hypot(*(float((w.own.to(w.common.dtype) - w.common).norm()) for w in weights))
    return moved <= _ROUNDING * math.hypot(*(float(w.common.norm()) for w in weights))


def scale_residuals(works: Iterable[Work], factor: float) -> None:
    """Multiplies the residuals by ``factor``."""
    for work in works:
        with work.bucket.order:
            work.scale_residual(factor)
