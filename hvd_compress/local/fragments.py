"""The turns in which local steps exchange weights: all at once, or one fragment after the other (Streaming DiLoCo)."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..engine.arguments import check_integer
from ..engine.engine import Engine
from ..engine.state import Entry, Tree
from ..engine.work import Work
from .common_weights import Weight


@dataclass(frozen=True)
class Fragment:
    """Weights that are exchanged together: ``works``, whole buckets, and the uncompressed tensors beside them."""

    number: int
    weights: Sequence[Weight]
    works: Sequence[Work]


class Turns:
    """Counts the local steps of a training, and the turns of its fragments: each is exchanged once in a period.

    Args:
        engine: of the compressor.
        weights: in the order of the parameters.
        period: local steps between two exchanges of one weight.
        fragments, delay: as of :class:`hvd_compress.LocalSteps`.

    Raises:
        TypeError: the period is not an integer.
        ValueError: the period does not fit the fragments or the delay, or there are too few buckets.
    """

    def __init__(self, engine: Engine, weights: Sequence[Weight], period: int, fragments: int, delay: int) -> None:
        self._engine, self._count, self._delay = engine, fragments, delay
        self.change(period)
        #: Local steps so far.
        self.number = 0
        units = _units(engine, weights)
        if len(units) < fragments:
            raise ValueError(
                f"{fragments} fragments need as many buckets or uncompressed tensors, and this compressor has "
                f"{len(units)}: take fewer, or build the compressor with a smaller bucket_mb"
            )
        parts = divided([sum(w.own.numel() for w in unit) for unit in units], fragments)
        self.fragments = [self._fragment(number, units[part.start : part.stop]) for number, part in enumerate(parts)]
        #: By fragment, the calls of ``LocalSteps.step()`` since its last exchange, or since the common weights were
        #: taken or averaged.
        self.ages = [0] * fragments
        # By fragment, the calls before those, of exchanges that were taken back.
        self._taken_back = [0] * fragments

    def change(self, period: int) -> None:
        """Makes the period another one. Raises as the constructor."""
        calls = check_integer("period", period, 1)
        if calls % self._count:
            raise ValueError(f"period must be a multiple of fragments, got {calls} and {self._count}")
        if self._delay > calls // self._count:
            raise ValueError(
                f"delay must lie in 0 to period / fragments = {calls // self._count}, got {self._delay}: the period "
                f"must be at least fragments * delay = {self._count * self._delay}"
            )
        self.period = calls

    def due(self, calls: int = 0) -> bool:
        """Whether the next exchange is due, or will be after so many more calls of ``LocalSteps.step()``."""
        return min(self.ages) + calls >= self.period // self._count

    @property
    def next(self) -> Fragment:
        """The fragment that is exchanged next."""
        return self.fragments[self._engine.step % self._count]

    @property
    def rounds(self) -> int:
        """How many times the fragment whose turn it is was exchanged."""
        return self._engine.step // self._count

    @property
    def age(self) -> int:
        """Local steps since the next fragment was last exchanged."""
        return self.ages[self.next.number] + self._taken_back[self.next.number]

    def take(self) -> None:
        """An exchange of the fragment whose turn it is has begun."""
        number = self.next.number
        self.ages[number] = self._taken_back[number] = 0

    def take_back(self, fragment: Fragment, age: int, at_once: bool) -> None:
        """Notes that an exchange of so many steps was taken back. ``at_once``: the next call begins another one."""
        counts = self.ages if at_once else self._taken_back
        counts[fragment.number] += age

    def count(self) -> None:
        """A local step was taken."""
        self.number += 1
        self.ages[:] = [age + 1 for age in self.ages]

    def restart(self) -> None:
        """All weights are the common weights. The turn and the number of steps stay."""
        self.ages[:] = self._taken_back[:] = [0] * len(self.ages)

    def steps(self) -> Tree:
        """The saved number of local steps."""
        return Entry(vars(self), "number", int, 0)

    def state(self, peers: bool) -> Tree:
        """The rest of the saved state. ``peers``: also the steps of exchanges that were taken back."""
        counts = {"": self.ages, **({" taken back": self._taken_back} if peers else {})}
        return {f"{n}{of}": Entry(held, n, int, low=0) for of, held in counts.items() for n in range(self._count)}

    def _fragment(self, number: int, units: Sequence[Sequence[Weight]]) -> Fragment:
        weights = sorted((weight for unit in units for weight in unit), key=lambda weight: weight.number)
        inside = {weight.place.work.bucket.index for weight in weights if weight.place is not None}
        return Fragment(number, weights, [work for work in self._engine.works if work.bucket.index in inside])


def divided(sizes: Sequence[int], count: int) -> list[range]:
    """Divides a sequence into ``count`` ranges, none empty, of about equal sums: each in turn is filled up to an equal
    share of what is left."""
    ranges, begin = list[range](), 0
    for left in range(count, 0, -1):
        share, end, filled = sum(sizes[begin:]) / left, begin + 1, sizes[begin]
        while len(sizes) - end >= left and filled + sizes[end] / 2 <= share:
            filled += sizes[end]
            end += 1
        ranges.append(range(begin, end))
        begin = end
    return ranges


def _units(engine: Engine, weights: Sequence[Weight]) -> list[list[Weight]]:
    """Returns units that cannot be divided, in the order of the buckets: a bucket, and the uncompressed tensors that
    follow its weights in the order of the parameters, as a bias does; those before all buckets are with the next one.
    Without buckets, each weight alone, last weights first."""
    if not engine.works:
        return [[weight] for weight in reversed(weights)]
    units: list[list[Weight]] = [[] for _ in engine.works]
    index = len(units) - 1  # the last bucket has the first weights
    for weight in weights:
        if weight.place is not None:
            index = weight.place.work.bucket.index
        units[index].append(weight)
    return units
