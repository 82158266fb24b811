"""The interface that the author of a method implements beside the algorithm of a bucket (:mod:`.work`)."""

import abc
from typing import Any, Protocol

from torch import Tensor

from .bucket import Bucket
from .clock import Clock
from .collectives import Collectives
from .facts import OptimizerFacts, Traits
from .state import Tree
from .work import Work


class Velocities(Protocol):
    """The velocities that a method keeps beside the residuals, by parameter. Called by checkpoints."""

    @property
    def of_compressed(self) -> bool:
        """Whether compressed parameters have a velocity, too."""

    def get(self, number: int) -> Tensor:
        """The velocity of parameter ``number``, in the shape of this rank's shard of it."""

    def set(self, number: int, velocity: Tensor) -> None:
        """Replaces the velocity of parameter ``number``."""


class Method(abc.ABC):
    """A method as the engine and its clocks call it. Only :meth:`work` must be
    implemented beside what :class:`hvd_compress.Compressor` has."""

    #: The :class:`~hvd_compress.engine.engine.Engine`, once it is built: the method owns it (:mod:`.owner`).
    engine: Any
    _clock: Clock | None = None

    @property
    def has_clock(self) -> bool:
        """Whether there is a clock: :attr:`clock` makes one."""
        return self._clock is not None

    @property
    @abc.abstractmethod
    def clock(self) -> Clock:
        """The object that begins and ends exchanges."""

    @abc.abstractmethod
    def work(self, bucket: Bucket) -> Work:
        """One bucket of this method: its algorithm. Called when the compressor is built, for every bucket."""

    @abc.abstractmethod
    def shard_groups(self) -> list[Collectives]:
        """The ranks that share parameters of the compressor, of each dimension of their meshes."""

    def compresses(self, parameter: Tensor) -> bool:
        """Whether this parameter is compressed if it has ``min_numel`` entries. Called when the compressor is built."""
        return True

    def options(self) -> dict[str, object]:
        """The arguments that must be the same on all ranks: numbers, strings, None or frozen dataclasses, by name. The
        ranks compare them before the first step; ``repr()`` shows them."""
        return {}

    @property
    def traits(self) -> Traits:
        """How averages depend on the gradients."""
        return Traits()

    def state(self) -> dict[str, Tree]:
        """Describes the saved state beside that of the buckets (:mod:`hvd_compress.engine.state`), and the options that
        a state depends on. Called to save, to check and, after :meth:`restart`, to load."""
        return {}

    def restart(self) -> None:
        """Called for another set of ranks (elastic), or before a state is loaded: resets what new ranks cannot know."""

    @property
    def velocities(self) -> Velocities | None:
        """The velocities, for checkpoints that fit any layout; None without momentum."""
        return None

    def dense_averaged(self, number: int, grad: Tensor) -> None:
        """Called with the averaged gradient of the uncompressed parameter ``number``; may modify it."""

    def undo(self) -> None:
        """Called when the last complete average is not applied: undoes what :meth:`dense_averaged` has changed."""

    def check_optimizer(self, facts: OptimizerFacts) -> None:
        """Called before each step of an optimizer that applies averages. Raises ``ValueError`` if it does not fit this
        method. What holds by :attr:`traits` is checked beside it."""

    def passed(self, tensor: Tensor) -> Tensor:
        """Called with an average that Horovod has computed itself, of an unknown or a sparse tensor."""
        return tensor
