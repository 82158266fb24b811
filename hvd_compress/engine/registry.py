"""The compressors of one process that exchange with the same ranks.

Ranks may begin with different ones of them (two tasks, each with its own optimizer), so each has a number that is the
same on all ranks, and whoever begins first starts the comparisons of all.
"""

import weakref
from collections.abc import Iterator
from typing import Any


class Registry:
    """Numbers engines in the order in which they are built, which is the same on all ranks. Keeps weak references."""

    def __init__(self) -> None:
        self._count = 0
        self._engines: list[weakref.ref[Any]] = []

    def add(self, engine: Any, number: int | None = None) -> int:
        """Registers an engine, which keeps its ``number`` if it has one already (elastic). Returns its number."""
        number = self._count if number is None else number
        self._engines = [*(other for other in self._engines if other() is not None), weakref.ref(engine)]
        self._count = max(self._count, number + 1)
        return number

    def __iter__(self) -> Iterator[Any]:
        """The engines that exist, in the order of their numbers."""
        return (engine for ref in self._engines if (engine := ref()) is not None)
