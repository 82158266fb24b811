"""The compressors of one process.

Ranks may begin with different ones of them, or end their steps in different orders (two tasks, each with its own
optimizer). So each has a number that is the same on all its ranks, and a rank that waits for one goes on with the
others.
"""

import weakref
from collections.abc import Iterator
from typing import Any

#: Of engines.
References = list[weakref.ref[Any]]


class Registry:
    """Numbers the engines of one set of ranks in the order in which they are built, which is the same on all ranks.

    Args:
        everywhere: the engines of the process that may exchange with any ranks; registries share it.
    """

    def __init__(self, everywhere: References | None = None) -> None:
        self._count = 0
        self._everywhere: References = [] if everywhere is None else everywhere

    def add(self, engine: Any, number: int | None = None) -> int:
        """Registers an engine, which keeps its ``number`` if it has one already (elastic). Returns its number."""
        number = self._count if number is None else number
        others = [other for other in self._everywhere if other() not in (None, engine)]
        self._everywhere[:] = [*others, weakref.ref(engine)]
        self._count = max(self._count, number + 1)
        return number

    def others(self, engine: Any) -> Iterator[Any]:
        """The process's other engines that exist and exchange gradients, with whichever ranks."""
        for reference in tuple(self._everywhere):
            other = reference()
            if other not in (None, engine) and other.collectives.active and other.collectives.size > 1:
                yield other

    @staticmethod
    def advance_others(waiting: "weakref.ref[Any]") -> None:
        """Continues the exchanges of all other engines than ``waiting`` as far as possible without waiting for them, or
        for a thread: another rank may wait for those first."""
        engine = waiting()
        for other in () if engine is None else engine.registry.others(engine):
            if not other.exchanges.running or not other.lock.acquire(blocking=False):
                continue
            try:
                with other.entered():
                    other.exchanges.advance()
            except BaseException:
                other.reset()
                raise
            finally:
                other.lock.release()
