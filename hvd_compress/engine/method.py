"""A method, as far as it is more than its buckets."""

import abc
from typing import Protocol

from torch import Tensor

from .bucket import Bucket
from .facts import Facts, Traits
from .state import Tree
from .work import Work


class Velocities(Protocol):
    """The velocities that a method keeps beside the residuals."""

    @property
    def of_compressed(self) -> bool:
        """Whether compressed parameters have one, too."""

    def get(self, number: int) -> Tensor:
        """That of a parameter, in the shape of this rank's part of it."""

    def set(self, number: int, velocity: Tensor) -> None:
        """Replaces it."""


class Method(abc.ABC):
    """What the author of a method implements, beyond its buckets; the engine and its drivers call it."""

    #: The method's own arguments: a dataclass, of which all fields must be the same on all ranks.
    arguments: object = None

    @abc.abstractmethod
    def work(self, bucket: Bucket) -> Work:
        """One bucket of this method: its algorithm. Called when the compressor is built, for every bucket."""

    def compresses(self, parameter: Tensor) -> bool:
        """Whether this parameter is compressed if it is large enough (``min_numel``). Called when the compressor is
        built."""
        return True

    def options(self) -> dict[str, object]:
        """The arguments, as far as they must be the same on all ranks: numbers, strings, None or frozen dataclasses, by
        name. They are compared before the first step, and part of this object's text."""
        return dict(vars(self.arguments)) if self.arguments else {}

    @property
    def traits(self) -> Traits:
        """What the method makes of gradients, as far as hosts, optimizers and local steps have to know."""
        return Traits()

    def state(self) -> dict[str, Tree]:
        """Describes the saved state beyond that of the buckets (:mod:`hvd_compress.engine.state`), and the options that
        a state depends on. Called to save, to check and to load; before loading, :meth:`restart` is called."""
        return {}

    def restart(self) -> None:
        """Called when the set of ranks has changed (elastic), or a state will be loaded: resets what new ranks cannot
        know."""

    @property
    def velocities(self) -> Velocities | None:
        """The velocities kept beside the residuals, for checkpoints that fit any mesh; None without momentum."""
        return None

    def dense_averaged(self, number: int, grad: Tensor) -> None:
        """Called with the averaged gradient of the uncompressed parameter ``number``; may modify it."""

    def exchanged(self) -> None:
        """Called when all exchanges of a step have ended; may modify the averages, and wait for other ranks."""

    @abc.abstractmethod
    def check_optimizer(self, facts: Facts) -> None:
        """Called before each step of an optimizer that applies averages. Raises ``ValueError`` if it does not fit this
        compressor."""

    def passed(self, tensor: Tensor) -> Tensor:
        """Called by Horovod with an average that this compressor has no part in: of an unknown or a sparse tensor."""
        return tensor
