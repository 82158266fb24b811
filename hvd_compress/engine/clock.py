"""The interface of clocks: what decides when an engine exchanges, and what becomes of the averages."""

import abc
from collections.abc import Callable, Mapping

from torch.optim import Optimizer

from .state import Tree


class Clock(abc.ABC):
    """Begins and ends an engine's exchanges: a host, which takes gradients, or rounds of local steps."""

    #: The end of an error: "is bound to Horovod: ...".
    bound: str
    #: Whether gradients stay each rank's own.
    takes_local_steps = False
    #: Whether only one optimizer may step the parameters.
    single = False
    #: Whether other ranks may compare this engine's configuration before that of another engine with which this rank
    #: begins: gradients of two models may arrive in any order.
    comes_first = False

    @property
    def alone(self) -> bool:
        """Whether there is no other rank, and none can join."""
        return False

    @property
    def collecting(self) -> bool:
        """Whether a step of gradients is in progress."""
        return False

    @property
    def undoable(self) -> bool:
        """Whether the last average of gradients may still be taken back."""
        return False

    @property
    def unapplied(self) -> bool:
        """Whether nobody has applied the last average so far. May synchronise a GPU."""
        return False

    def undo(self) -> None:
        """Adds what was sent for the last average back to the residuals."""

    def undo_by(self, restore: Callable[[], None]) -> None:
        """A later :meth:`undo` calls ``restore``: the methods can undo an exchange only once."""

    @abc.abstractmethod
    def options(self) -> Mapping[str, object]:
        """Returns values that must be the same on all ranks, beside the method's options."""

    @abc.abstractmethod
    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called before each step of an optimizer with some of the parameters. ``ValueError`` if it does not fit."""

    @abc.abstractmethod
    def after_optimizer_step(self, optimizer: Optimizer, counts: bool) -> None:
        """Called after such a step. ``counts``: false for an optimizer inside another one, which steps after it."""

    def before_other_step(self, optimizer: Optimizer) -> None:
        """Called before each step of any other optimizer of the process."""

    def discard(self) -> None:
        """See :meth:`hvd_compress.Compressor.discard_step`."""

    @abc.abstractmethod
    def reset(self, wait: bool = False) -> None:
        """Called when an exchange has failed, and by the user: takes back what is in progress. ``wait``: wait for
        messages that the other ranks answer."""

    @abc.abstractmethod
    def restart(self, same_ranks: bool) -> None:
        """Called before a state is loaded, and when the set of ranks has changed (elastic): takes back what is in
        progress, forgets the last average, and lets the ranks compare their configurations again. The parameters may be
        new already. ``same_ranks``: the other ranks still answer, so messages are waited for."""

    @abc.abstractmethod
    def begin_saving(self) -> None:
        """Called by all ranks before saving. Waits for what is in flight. Raises ``RuntimeError`` within a step."""

    def check_equal_weights(self) -> None:
        """Called by all ranks before they save one state together. Raises ``RuntimeError`` if their weights differ."""

    def state(self) -> dict[str, Tree]:
        """Describes the clock's part of the saved state."""
        return {}
