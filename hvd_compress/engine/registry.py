"""The compressors of one process.

With several (two tasks, each with its own optimizer), ranks may begin with different ones, or end their steps in
different orders. So each has a number that is the same on all its ranks, and a rank that waits for one compressor
continues the exchanges of the others.
"""

from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary


class Registry:
    """Numbers the compressors of one set of ranks in the order in which they are built, which is the same on all ranks.

    Args:
        everywhere: the compressors that may exchange with any ranks, by their ``id()``; registries share it.
    """

    def __init__(self, everywhere: WeakValueDictionary[int, Any] | None = None) -> None:
        self._count = 0
        self._everywhere = WeakValueDictionary[int, Any]() if everywhere is None else everywhere

    def number(self) -> int:
        """The number of one more compressor."""
        self._count += 1
        return self._count - 1

    def add(self, method: Any, number: int) -> None:
        """Registers a compressor, which keeps its ``number`` (elastic)."""
        self._everywhere[id(method)] = method
        self._count = max(self._count, number + 1)

    def others(self, method: Any) -> Iterator[Any]:
        """The process's other compressors that exist."""
        found = (reference() for reference in self._everywhere.valuerefs())
        return (other for other in found if other is not None and other is not method)
