"""The books: what one rank sends, counted where it is handed over, everything included."""

import statistics
from collections import defaultdict, deque
from typing import Any

from .collectives import Request, ring_bytes

KINDS = ("values", "indices", "dense_tensor", "budget")
_RECENT = 1001


class Traffic:
    """Bytes of the step under way, of the last whole step and of all; and the compressor's own time."""

    def __init__(self) -> None:
        self._now = _empty()
        self._last = _empty()
        self._total = _empty()
        self._busy = 0.0
        self._ended = False
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def begin_step(self) -> None:
        if self._ended:
            self._recent.append(self._busy)
        self._now, self._busy, self._ended = _empty(), 0.0, False

    def count_gradient(self, numel: int, ranks: int) -> None:
        """A gradient that is compressed: what it would have cost."""
        self._now["dense"] += ring_bytes("allreduce", 4 * numel, ranks)

    def count_dense(self, numel: int, size: int, ranks: int) -> None:
        """A gradient of ``size`` bytes that Horovod reduces as it is."""
        self.count_gradient(numel, ranks)
        self._now["dense_tensor"] += ring_bytes("allreduce", size, ranks)

    def count_request(self, request: Request, ranks: int) -> None:
        """A collective of an exchange."""
        self._now[request.kind] += request.wire_bytes(ranks)

    def busy(self, seconds: float) -> None:
        """Time spent in the compressor, without waiting."""
        self._busy += seconds

    def end_step(self) -> None:
        self._last = self._now
        for kind, size in self._now.items():
            self._total[kind] += size
        self._ended = True

    def report(self) -> dict[str, Any]:
        """``last``, ``total`` and ``compress_ms`` of ``Compressor.stats()``."""
        return {
            "last": _books(self._last),
            "total": _books(self._total),
            "compress_ms": 1e3 * statistics.median([*self._recent, *([self._busy] if self._ended else [])] or [0.0]),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"last": dict(self._last), "total": dict(self._total)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last, self._total = _empty(state["last"]), _empty(state["total"])


def _empty(counts: dict[str, float] | None = None) -> defaultdict[str, float]:
    return defaultdict(float, counts or {})


def _books(counts: dict[str, float]) -> dict[str, float]:
    parts = {kind: counts.get(kind, 0.0) for kind in KINDS}
    dense = counts.get("dense", 0.0)
    wire = sum(counts.values()) - dense
    named = {f"{kind}_bytes": size for kind, size in parts.items()}
    return {"dense_bytes": dense, "wire_bytes": wire, **named, "wire_ratio": dense / wire if wire else float("nan")}
