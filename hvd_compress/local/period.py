"""How many local steps lie between two rounds of one weight: a number, or a schedule."""

from collections.abc import Callable
from typing import TypeAlias

from ..engine.arguments import check_integer
from ..engine.state import Entry

#: Local steps between two rounds of one weight, or a function of the local steps so far that returns them.
Period: TypeAlias = int | Callable[[int], int]


class Schedule:
    """Counts the local steps of a training, and knows the period at each.

    Args:
        period: see :data:`Period`.
        fragments, delay: as of :class:`hvd_compress.LocalSteps`, which the period must fit.

    Raises:
        TypeError, ValueError: the period is not an integer, or does not fit.
    """

    def __init__(self, period: Period, fragments: int, delay: int) -> None:
        self._fragments, self._delay = fragments, delay
        #: Local steps so far.
        self.number = 0
        self.change(period)

    @property
    def period(self) -> int:
        """Local steps between two rounds of one weight, at this local step. Raises as the constructor."""
        return self._checked(self._period)

    def count(self) -> None:
        """A local step was taken."""
        self.number += 1

    def change(self, period: Period) -> None:
        """Makes the period another one. Raises as the constructor."""
        self._checked(period)
        self._period = period

    def state(self) -> Entry:
        """The saved state."""
        return Entry(vars(self), "number", int, 0)

    def _checked(self, period: Period) -> int:
        calls = check_integer("period", period(self.number) if callable(period) else period, 1)
        if calls % self._fragments:
            raise ValueError(f"period must be a multiple of fragments, got {calls} and {self._fragments}")
        if self._delay > calls // self._fragments:
            raise ValueError(
                f"delay must lie in 0 to period / fragments = {calls // self._fragments}, got {self._delay}: the "
                f"period must be at least fragments * delay = {self._fragments * self._delay}"
            )
        return calls
