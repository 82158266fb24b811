"""What one rank does when, in the format that chrome://tracing and Perfetto read."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any


class Trace:
    """Spans of ``steps``, each in a row: the model's, the compressor's, and a row for each bucket's collectives.

    A collective lasts from its start until the compressor saw that it was done, which may be a while after it was.
    """

    MODEL, COMPRESSOR, STEP = "model", "compressor", "step"

    def __init__(self, steps: range) -> None:
        self.steps = steps
        self.on = False
        self.spans: list[dict[str, Any]] = []

    def step(self, number: int) -> None:
        """A step begins: a mark without length."""
        self.on = number in self.steps
        now = time.perf_counter()
        self.add(self.MODEL, self.STEP, now, now)

    def add(self, row: str, name: str, begin: float, end: float) -> None:
        """In seconds of ``time.perf_counter``."""
        if self.on:
            event = {"name": name, "ph": "X", "pid": 0, "tid": row, "ts": 1e6 * begin, "dur": 1e6 * (end - begin)}
            self.spans.append(event)

    @contextmanager
    def span(self, row: str, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(row, name, begin, time.perf_counter())

    def watch(self, compression: Any) -> None:
        """From now on, what this compressor does is in the trace; of one of hvd_compress', its collectives, too."""
        for name in ("compress", "decompress"):
            setattr(compression, name, self._spanned(name, getattr(compression, name)))
        driver = getattr(compression, "_driver", None)
        if driver is not None:
            driver._collectives = _Watched(driver._collectives, self)

    def _spanned(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def spanned(*args: Any) -> Any:
            with self.span(self.COMPRESSOR, name):
                return function(*args)

        return spanned

    def write(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"traceEvents": self.spans, "displayTimeUnit": "ms"}) + "\n")


class _Watched:
    """Collectives, seen by a trace. Their names end in the bucket, the kind of message and its number."""

    def __init__(self, collectives: Any, trace: Trace) -> None:
        self._collectives, self._trace = collectives, trace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collectives, name)

    def start(self, request: Any, name: str) -> Any:
        bucket = name.split(".")[-3]
        text = f"{request.verb} {request.kind}, {request.tensor.nbytes / 1e3:,.1f} kB"
        return _WatchedHandle(self._collectives.start(request, name), self._trace, f"bucket {bucket}", text)


class _WatchedHandle:
    def __init__(self, handle: Any, trace: Trace, row: str, text: str) -> None:
        self._handle, self._trace, self._row, self._text = handle, trace, row, text
        self._begin = time.perf_counter()
        self._seen = False

    def done(self) -> bool:
        done = bool(self._handle.done())
        if done and not self._seen:
            self._seen = True
            self._trace.add(self._row, self._text, self._begin, time.perf_counter())
        return done

    def result(self) -> Any:
        return self._handle.result()
