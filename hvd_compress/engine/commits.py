"""The attempts that a rank has committed, where ranks come and go."""

from collections.abc import Iterable

from .engine import Engine

Attempt = tuple[int, int]

# Committed attempts that are remembered for ranks in doubt.
_REMEMBERED = 1024


class Commits:
    """Remembers recent commits, for undecided ranks. Counts consecutive failures and warns at the 1st, 10th, 100th and
    1,000th.

    Args:
        engine: warns.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._failures = engine, 0
        self.attempts: list[Attempt] = []

    def add(self, attempt: Attempt) -> None:
        """This rank has committed it."""
        self._failures = 0
        self.attempts = [*self.attempts, attempt][-_REMEMBERED:]

    def replace(self, attempts: Iterable[Attempt]) -> None:
        """Takes those of the rank from which this one is healed."""
        self.attempts = list(attempts)

    def fail(self, what: str, why: str) -> None:
        """An attempt has failed. The warning is ``what``, how many times in a row, and ``why``."""
        self._failures += 1
        if self._failures in (1, 10, 100, 1000):
            row = "" if self._failures == 1 else f" ({self._failures} in a row)"
            self._engine.warn(f"{what}{row}{why}")
