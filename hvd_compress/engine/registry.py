"""The compressors of one process.

With several (two tasks, each with its own optimizer), ranks may begin with different ones, or end their steps in
different orders. So each has a number that is the same on all its ranks, and a rank that waits for one compressor
continues the exchanges of the others.
"""

import weakref
from collections.abc import Iterator
from typing import Protocol


class Peer(Protocol):
    """An engine, as the others of its process see it."""

    @property
    def exchanging(self) -> bool:
        """Whether it exchanges with other ranks at all."""

    def advance_if_free(self) -> None:
        """Continues its exchanges as far as possible without waiting for them, or for a thread."""

    @property
    def compares(self) -> bool:
        """Whether its configuration is still to be compared, and another rank may begin with that."""

    def join_comparison(self) -> None:
        """Starts to compare its configuration, unless that is in progress. Does not wait."""

    def advance_comparison(self) -> None:
        """Continues to compare its configuration, without waiting."""


class Registry:
    """Numbers the engines of one set of ranks in the order in which they are built, which is the same on all ranks.

    Args:
        everywhere: the engines of the process that may exchange with any ranks; registries share it.
    """

    def __init__(self, everywhere: "list[weakref.ref[Peer]] | None" = None) -> None:
        self._count = 0
        self._everywhere: list[weakref.ref[Peer]] = [] if everywhere is None else everywhere

    def number(self) -> int:
        """The number of one more engine."""
        self._count += 1
        return self._count - 1

    def add(self, engine: Peer, number: int | None = None) -> int:
        """Registers an engine, which keeps its ``number`` if it has one already (elastic). Returns its number."""
        number = self.number() if number is None else number
        others = [other for other in self._everywhere if other() not in (None, engine)]
        self._everywhere[:] = [*others, weakref.ref(engine)]
        self._count = max(self._count, number + 1)
        return number

    def others(self, engine: Peer) -> Iterator[Peer]:
        """The process's other engines that exist and exchange gradients."""
        for reference in tuple(self._everywhere):
            other = reference()
            if other is not None and other is not engine and other.exchanging:
                yield other
