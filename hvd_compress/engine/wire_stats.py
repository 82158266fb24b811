"""Byte accounting of one rank: everything it sends, counted where it is handed to the host."""

import statistics
from collections import deque
from typing import get_args

from .collectives import Category, Request, ring_bytes
from .state import Entry, Tree

CATEGORIES: tuple[Category, ...] = get_args(Category)
_ALL = ("dense", *CATEGORIES, "inside")
_RECENT_STEPS = 1001


class WireStats:
    """Bytes of the current step, of the last complete step and in total; and the time spent in the compressor."""

    def __init__(self) -> None:
        self._current = _counts()
        self._last = _counts()
        self._total = _counts()
        # Time spent in the compressor in the current step, waiting excluded.
        self._seconds = 0.0
        self._complete = False
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)

    def begin_step(self) -> None:
        if self._complete:
            self._recent.append(self._seconds)
        self._current, self._seconds, self._complete = _counts(), 0.0, False

    def count_seconds(self, seconds: float) -> None:
        """Counts time spent in the compressor, waiting excluded."""
        self._seconds += seconds

    def count_gradient(self, numel: int, ranks: int, share: float = 1.0) -> None:
        """Counts the bytes of a float32 ring allreduce over all ``ranks`` of a gradient of ``numel`` entries, to
        compare with. ``share``: the fraction of them that counts for this rank, in a node whose ranks share a link."""
        self._current["dense"] += share * ring_bytes("allreduce", 4 * numel, ranks)

    def count_dense(self, numel: int, byte_count: int, ranks: int, per_node: int = 1) -> None:
        """Counts a gradient that is allreduced over all ``ranks`` without compression, in ``byte_count`` bytes. In the
        ring, one of a node's ``per_node`` ranks sends to another node."""
        self.count_gradient(numel, ranks, 1.0 / per_node)
        sent = ring_bytes("allreduce", byte_count, ranks)
        self._current["dense_tensor"] += sent / per_node
        self._current["inside"] += sent * (per_node - 1) / per_node

    def count_request(self, request: Request, ranks: int, per_node: int = 1) -> None:
        """Counts a collective of ``ranks``, of which each node has ``per_node``, as :meth:`count_dense` does."""
        sent = request.wire_bytes(ranks)
        if request.level == "inside":
            self._current["inside"] += sent
            return
        self._current[request.category] += sent / per_node
        self._current["inside"] += sent * (per_node - 1) / per_node

    def end_step(self) -> None:
        self._last = self._current
        for category, byte_count in self._current.items():
            self._total[category] += byte_count
        self._complete = True

    def report(self) -> dict[str, float | dict[str, float]]:
        """``last``, ``total`` and ``compress_ms`` of ``Compressor.stats()``."""
        seconds = [*self._recent, *([self._seconds] if self._complete else [])]
        return {
            "last": _summary(self._last),
            "total": _summary(self._total),
            "compress_ms": 1e3 * statistics.median(seconds or [0.0]),
        }

    def state(self) -> Tree:
        """The saved state."""
        return {
            when: {category: Entry(counts, category, float, low=0.0, per_rank=True) for category in counts}
            for when, counts in (("last", self._last), ("total", self._total))
        }


def _counts() -> dict[str, float]:
    return dict.fromkeys(_ALL, 0.0)


def _summary(counts: dict[str, float]) -> dict[str, float]:
    dense = counts["dense"]
    wire = sum(counts[category] for category in CATEGORIES)
    parts = {f"{category}_bytes": counts[category] for category in CATEGORIES}
    ratio = dense / wire if wire else float("nan")
    return {"dense_bytes": dense, "wire_bytes": wire, **parts, "inside_bytes": counts["inside"], "wire_ratio": ratio}
