"""What one rank does when, in the format that chrome://tracing and Perfetto read."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from experiment.files import write_json


def exchanges(compression: Any) -> Any:
    """What runs the exchanges of a compressor of hvd_compress; None for a stock one."""
    return getattr(getattr(compression, "engine", None), "exchanges", None)


class Trace:
    """Spans of ``steps``, each in a row: the model's, the compressor's, and a row for each bucket's collectives.

    A collective lasts from its start until the compressor polled it as done, which may be later than its end.
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
        """Records this compressor's calls from now on and, if it is of hvd_compress, its collectives."""
        for name in ("compress", "decompress"):
            setattr(compression, name, self._spanned(name, getattr(compression, name)))
        if (found := exchanges(compression)) is not None:
            found._collectives = _Watched(found._collectives, self)

    def _spanned(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def spanned(*args: Any) -> Any:
            with self.span(self.COMPRESSOR, name):
                return function(*args)

        return spanned

    def write(self, file: Path) -> None:
        write_json(file, {"traceEvents": self.spans, "displayTimeUnit": "ms"})


class _Watched:
    """Collectives that are recorded. Their names end in the bucket, the kind of message and its number."""

    def __init__(self, collectives: Any, trace: "Trace") -> None:
        self._collectives, self._trace = collectives, trace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collectives, name)

    def start(self, request: Any, name: str) -> Any:
        begin, handle = time.perf_counter(), self._collectives.start(request, name)
        text = f"{request.verb} {request.kind}, {request.tensor.nbytes / 1e3:,.1f} kB"
        row = f"bucket {name.split('.')[-3]}"
        return _WatchedHandle(handle, lambda: self._trace.add(row, text, begin, time.perf_counter()))


class _WatchedHandle:
    def __init__(self, handle: Any, record: Callable[[], None]) -> None:
        self._handle, self._record = handle, record
        self._seen = False

    def done(self) -> bool:
        done = bool(self._handle.done())
        if done and not self._seen:
            self._seen = True
            self._record()
        return done

    def result(self) -> Any:
        return self._handle.result()
