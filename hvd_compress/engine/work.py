"""One bucket of one method: its state and its algorithm, as the engine calls them."""

import abc
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from .bucket import Bucket, Piece
from .collectives import Request
from .exchange import Exchange
from .state import Tree


@dataclass(frozen=True)
class Step:
    """The facts of a step that all buckets get.

    ``number``: of completed steps. ``rank``, ``ranks``: this rank, and how many there are. ``scale``: the loss scale of
    the gradients (the ``GradScaler``'s, or 1). ``seed``: of all random numbers. ``settings``: a hash of the method's
    options. ``compared``: whether the clock compares :attr:`digest` between the ranks.
    """

    number: int
    rank: int
    ranks: int
    scale: float
    seed: int
    settings: int
    compared: bool = False

    @property
    def digest(self) -> int:
        """A hash of what must be the same on all ranks: 32 bits."""
        return zlib.crc32(repr((self.seed, self.number, self.settings)).encode())

    def every(self, interval: int) -> bool:
        """Whether this is the last of every ``interval`` steps; never if that is 0."""
        return interval > 0 and self.number % interval == interval - 1


class Part:
    """Something that a method keeps for one bucket from step to step."""

    def begin(self, step: Step) -> None:
        """Called when a step begins: the last one can no longer be undone. Must not communicate."""

    def undo(self) -> None:
        """Called when the average is not applied (skipped, discarded, failed): undoes what the exchange changed."""

    def restart(self) -> None:
        """Called for other ranks (elastic) and before loading: forgets the last step and what new ranks cannot know."""

    def state(self) -> Tree:
        """Describes what a checkpoint contains (:mod:`hvd_compress.engine.state`), by piece name where it has one."""
        return {}


class Work(Part, abc.ABC):
    """A bucket, the parts of a method, and its algorithm. The bucket's residual may stay after :meth:`restart`."""

    #: The step that began last.
    step: Step

    def __init__(self, bucket: Bucket, **parts: Part) -> None:
        self.bucket = bucket
        #: By piece, what is to be subtracted from its gradient in this step, float32. The gradient is not written to.
        #: Only works that do so get any (``LeavesCodes`` in ``local/common_weights.py``).
        self.starts = dict[int, Tensor]()
        #: By name, in the order in which they begin; they are undone in reverse order.
        self.parts = parts

    @abc.abstractmethod
    def accumulate(self) -> None:
        """Adds ``bucket.gradients``, in memory order, empty where none arrived, to the state. Must not communicate."""

    @abc.abstractmethod
    def exchange(self) -> Exchange:
        """The algorithm: a generator that yields collectives (:mod:`hvd_compress.engine.collectives`), is sent their
        results, and writes the averages to ``bucket.gradients``. What these held is gone: a host may zero them."""

    def first_requests(self) -> tuple[Request, ...]:
        """The requests with which the exchange of the step that has begun will begin, if they are known already."""
        return ()

    def begin(self, step: Step) -> None:
        self.step = step
        self.starts.clear()
        for part in self.parts.values():
            part.begin(step)

    def undo(self) -> None:
        for part in reversed(self.parts.values()):
            part.undo()

    def commit(self) -> None:
        """Called when the last exchange can no longer be undone, if that is before the next step."""

    def restart(self) -> None:
        for part in self.parts.values():
            part.restart()

    def state(self) -> dict[str, Tree]:
        return {"residual": self.saved(self.unsent()), **{name: part.state() for name, part in self.parts.items()}}

    def saved(self, residual: Tensor) -> Tree:
        """Describes the residual, or a tensor of the same form, in a checkpoint."""
        return self.bucket.saved(residual, per_rank=True)

    def unsent(self) -> Tensor:
        """The bucket's residual without what was sent: float32, (blocks * 256,). Read only, but after :meth:`restart`,
        when it is the residual itself, into which a state is loaded."""
        return self.bucket.residual

    def residual_of(self, piece: Piece) -> Tensor:
        """The residual of a piece, in its shape: float32. Read only."""
        return piece.shaped(self.unsent())

    def set_residual(self, piece: Piece, entries: Tensor) -> None:
        """Replaces the residual of a piece. Called between steps."""
        piece.of(self.bucket.residual).zero_()
        piece.shaped(self.bucket.residual).copy_(entries)

    def scale_residual(self, factor: float) -> None:
        """Multiplies the residual by ``factor``, in [0, 1]. Called between steps."""
        self.bucket.residual.mul_(factor)


def undo(works: Iterable[Work]) -> None:
    """Adds what the last exchange of these buckets has sent back to their residuals."""
    for work in works:
        with work.bucket.order:
            work.undo()


def any_unsent(works: Iterable[Work]) -> bool:
    """Whether a residual of these buckets is not zero. Synchronises a GPU."""
    return any(bool(work.residual_of(piece).any()) for work in works for piece in work.bucket.pieces)
