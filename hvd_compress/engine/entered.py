"""The context in which hosts and local steps call an engine."""

import threading
import time
from collections.abc import Callable

from .exchange import Exchanges
from .modes import turn_off
from .wire_stats import WireStats


class Entered:
    """Holds an engine's lock, turns torch's modes off (:mod:`.modes`), and counts the time that is not spent waiting.
    May be nested. Used for every gradient: a class is faster than a generator."""

    def __init__(self, lock: "threading.RLock", exchanges: Exchanges, stats: WireStats) -> None:
        self._lock, self._exchanges, self._stats = lock, exchanges, stats
        # What to turn on again, and when it began.
        self._open: list[tuple[Callable[[], object] | None, float]] = []

    @property
    def again(self) -> bool:
        """Whether this thread is within it. Waits for others."""
        with self._lock:
            return bool(self._open)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._open.append((turn_off(), time.perf_counter() - self._exchanges.seconds_waited))

    def __exit__(self, *error: object) -> None:
        turn_on, begin = self._open.pop()
        if not self._open:
            self._stats.count_seconds(time.perf_counter() - self._exchanges.seconds_waited - begin)
        if turn_on is not None:
            turn_on()
        self._lock.release()
