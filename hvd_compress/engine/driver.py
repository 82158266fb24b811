"""What decides when an engine exchanges, and what becomes of the averages."""

from collections.abc import Callable, Mapping
from typing import Protocol

from torch.optim import Optimizer

from .state import Tree


class Unapplied(Protocol):
    """An average that nobody has applied so far."""

    def undo(self) -> None:
        """What it has sent returns to the residuals."""

    def undo_by(self, restore: Callable[[], None]) -> None:
        """From now on ``restore`` undoes it, if it is to be undone: the methods' own means to do so are used up."""


class Driver(Protocol):
    """The clock of an engine. An engine has one at a time, and only it begins and ends exchanges."""

    @property
    def comes_first(self) -> bool:
        """Whether another rank may begin with the comparison of this engine's configuration while this rank is in
        another engine's: gradients of two models may arrive in any order."""

    @property
    def single(self) -> bool:
        """Whether one optimizer only may step the parameters."""

    @property
    def unapplied(self) -> Unapplied | None:
        """The last average, if nobody has applied it so far. May synchronise a GPU."""

    def options(self) -> Mapping[str, object]:
        """What must be the same on all ranks, beside the method's."""

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called before each step of an optimizer that holds some of the parameters. Raises ``ValueError`` if it does
        not fit."""

    def after_optimizer_step(self, optimizer: Optimizer, counts: bool) -> None:
        """Called after it. ``counts``: false of the optimizer inside another one, which steps after it."""

    def before_other_step(self, optimizer: Optimizer) -> None:
        """Called before each step of any other optimizer of the process."""

    def reset(self, wait: bool = False) -> None:
        """An exchange has failed, or the user begins anew: what is in progress did not happen. ``wait``: for messages
        that the other ranks answer."""

    def restart(self, same_ranks: bool) -> None:
        """A state will be loaded, or the set of ranks has changed: as :meth:`reset`, the last average is forgotten, and
        the ranks compare their configurations again. The parameters may be new already. ``same_ranks``: waits for
        messages, if the others still answer."""

    def begin_saving(self) -> None:
        """Called by all ranks before a state is saved. Waits for what is in flight. Raises ``RuntimeError`` in the
        middle of a step."""

    def check_equal_weights(self) -> None:
        """Called by all ranks before they save one state together. Raises ``RuntimeError`` if their weights differ."""

    def state(self) -> dict[str, Tree]:
        """Describes its part of the saved state."""
