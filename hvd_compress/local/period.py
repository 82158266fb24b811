"""How many local steps lie between two rounds of one weight."""

from ..engine.arguments import check_integer
from ..engine.state import Entry


class Schedule:
    """Counts the local steps of a training, and knows the period.

    Args:
        period: local steps between two rounds of one weight.
        fragments, delay: as of :class:`hvd_compress.LocalSteps`, which the period must fit.

    Raises:
        TypeError, ValueError: the period is not an integer, or does not fit.
    """

    def __init__(self, period: int, fragments: int, delay: int) -> None:
        self._fragments, self._delay = fragments, delay
        #: Local steps so far.
        self.number = 0
        self.change(period)

    def count(self) -> None:
        """A local step was taken."""
        self.number += 1

    def change(self, period: int) -> None:
        """Makes the period another one. Raises as the constructor."""
        calls = check_integer("period", period, 1)
        if calls % self._fragments:
            raise ValueError(f"period must be a multiple of fragments, got {calls} and {self._fragments}")
        if self._delay > calls // self._fragments:
            raise ValueError(
                f"delay must lie in 0 to period / fragments = {calls // self._fragments}, got {self._delay}: the "
                f"period must be at least fragments * delay = {self._fragments * self._delay}"
            )
        self.period = calls

    def state(self) -> Entry:
        """The saved state."""
        return Entry(vars(self), "number", int, 0)
