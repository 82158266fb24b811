"""What the engine and the hosts call of a method, of local steps and of a host."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from .bucket import Bucket
from .guard import Facts, Traits
from .state import Tree
from .work import Work


class Host(Protocol):
    """Who passes the gradients in and applies the averages."""

    @property
    def single(self) -> bool:
        """Whether one optimizer only may step the parameters: it is the one whose gradients are passed in."""

    @property
    def detached(self) -> bool:
        """Whether its hooks were taken away: the gradients that optimizers apply have not come from here."""

    def given(self, optimizer: Optimizer) -> bool | None:
        """Whether the host's own kind of optimizer was given this compressor; None for a plain optimizer."""

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raises an error for an optimizer that reduces gradients in a way that does not fit, and warns of one whose
        gradients have not come from here."""


class Velocities(Protocol):
    """The velocities that a method keeps beside the residuals."""

    @property
    def of_compressed(self) -> bool:
        """Whether compressed parameters have one, too."""

    def get(self, number: int) -> Tensor:
        """That of a parameter, in the shape of this rank's part of it."""

    def set(self, number: int, velocity: Tensor) -> None:
        """Replaces it."""


class Method(Protocol):
    """A method, beyond its buckets."""

    @property
    def traits(self) -> Traits: ...

    def options(self) -> Mapping[str, object]:
        """What must be the same on all ranks: numbers, strings, None or frozen dataclasses."""

    def compresses(self, parameter: Tensor) -> bool:
        """Whether this parameter is compressed if it is large enough."""

    def work(self, bucket: Bucket) -> Work:
        """A bucket at work."""

    def restart(self) -> None:
        """The set of ranks has changed, or a state will be loaded."""

    def state(self) -> dict[str, Tree]:
        """Describes the saved state beyond the buckets', and the options that a state depends on."""

    @property
    def velocities(self) -> Velocities | None:
        """None if the method has no momentum."""

    @property
    def host(self) -> Host: ...

    def check_optimizer(self, facts: Facts) -> None:
        """Called before each step of an optimizer. Raises ``ValueError`` if it does not fit."""

    def dense_averaged(self, number: int, grad: Tensor) -> None:
        """Called with the averaged gradient of the uncompressed parameter ``number``; may modify it."""

    def exchanged(self) -> None:
        """Called when all exchanges of a step have ended; may modify the averages, and wait for other ranks."""


class LocalStepping(Protocol):
    """Local steps, which run the exchanges instead of a host."""

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called before each step of an optimizer that holds some of the parameters. Raises ``ValueError`` for one that
        takes no local steps."""

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called after it."""

    def options(self) -> Mapping[str, object]:
        """What must be the same on all ranks."""

    def restart(self, same_ranks: bool) -> None:
        """A state will be loaded, or the set of ranks has changed: forgets what is in flight, before the step is
        dropped. The parameters may be new already. ``same_ranks``: waits for their messages, if they still come."""

    def dropped(self) -> None:
        """The step in progress was dropped, if there was one."""

    def drain(self, to_save: bool = False) -> None:
        """Ends the step in progress, if there is one. Waits. ``to_save``: all ranks save their states."""

    def check_common(self) -> None:
        """Raises ``RuntimeError`` if the weights of ranks may differ."""

    def state(self) -> Tree:
        """Describes the saved state."""
