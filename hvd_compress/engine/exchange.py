"""Runs exchanges: starts the collectives they yield and resumes them with the results."""

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from .bucket import Bucket
from .collectives import Handle, Nodes, Request
from .profiling import Stage, stage
from .wire_stats import WireStats

# Seconds between polls. Horovod looks for new work every millisecond, so shorter ones gain nothing.
POLL_INTERVAL = 200e-6

T = TypeVar("T")
#: A request, whose result the exchange is sent, or several that start together, for a list of results.
Requests = Request | tuple[Request, ...]
Exchange = Generator[Requests, Any, None]


def beside(check: Generator[Request, Any, None], exchange: Generator[Request, Any, T]) -> Generator[Requests, Any, T]:
    """An exchange whose first collective starts together with the only one of ``check``, so that neither waits for the
    other on a link with a delay. What ``check`` raises ends the exchange before it has seen a result."""
    checked, result = yield next(check), next(exchange)
    with suppress(StopIteration):
        check.send(checked)
    while True:
        try:
            request = exchange.send(result)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        result = yield request


@dataclass(eq=False)
class _Running:
    """An exchange in progress and the collectives it waits for."""

    bucket: Bucket
    exchange: Exchange
    handles: list[Handle] = field(default_factory=list)
    #: What the exchange does when it is resumed.
    stage: Stage = "select"
    collectives: Counter[str] = field(default_factory=Counter)
    #: The collective that it has asked for, if that is to start later.
    postponed: Request | None = None

    def resumed(self, postponed: Request | None = None) -> None:
        """Forgets the collectives that the exchange has waited for. ``postponed``: one that is to start later."""
        self.handles, self.postponed = [], postponed

    def started(self, request: Request, handle: Handle) -> None:
        """Notes that this collective has started, and that the exchange waits for it, beside others."""
        self.handles.append(handle)
        self.stage = request.then
        self.collectives[request.name] += 1

    @property
    def arrived(self) -> bool:
        """Whether it waits for collectives, whose results would not block the host."""
        return bool(self.handles) and all(handle.done() for handle in self.handles)


class Exchanges:
    """The exchanges in progress of one engine.

    A collective's name is ``label``, its bucket, and its number among the exchange's collectives of one
    ``Request.name``: the same in every step, as Horovod's response cache requires.

    Where collectives are matched by name, exchanges are resumed as their collectives finish. Where they are matched by
    the order of calls, the order must not depend on timing: exchanges are resumed in the order of their launches, one
    collective each in turn. A broadcast inside a node, before which an owner waits for more collectives than the
    others, is postponed until all exchanges have come to theirs.

    ``meanwhile`` is called again and again while all exchanges wait.
    """

    def __init__(
        self, nodes: Nodes, stats: WireStats, label: str, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        self.nodes, self._stats, self.label, self._meanwhile = nodes, stats, label, meanwhile
        self._running: list[_Running] = []
        self._looked = 0.0
        #: Seconds spent waiting so far.
        self.seconds_waited = 0.0

    @property
    def running(self) -> bool:
        """Whether there are exchanges in progress."""
        return bool(self._running)

    def due(self) -> bool:
        """Whether exchanges are in progress that have not been looked at for a while."""
        return bool(self._running) and time.perf_counter() - self._looked > POLL_INTERVAL

    def launch(self, bucket: Bucket, exchange: Exchange) -> None:
        """Starts an exchange, up to its first collective. Never waits."""
        running = _Running(bucket, exchange)
        self._running.append(running)
        self._resume(running)

    def advance(self) -> bool:
        """Resumes every exchange whose result would not block the host; True if there was any."""
        advanced, self._looked = False, time.perf_counter()
        for running in list(self._running):
            while running in self._running and running.arrived:
                self._resume(running)
                advanced = True
        return advanced

    def take_turns(self) -> None:
        """Resumes exchanges. Where collectives are matched by name: those whose collective has ended, without waiting.
        Where they are matched by the order of calls: each exchange once, waiting for its collective, so that all ranks
        that call this equally often start the next collectives in one order."""
        if not self.nodes.everyone.ordered:
            self.advance()
            return
        for running in list(self._running):
            if running.postponed is None:
                self._resume(running)

    def finish(self) -> None:
        """Runs all exchanges to their ends."""
        while self._running:
            if self.nodes.everyone.ordered:
                self.take_turns()
                self._start_postponed()
            elif not self.advance():
                self._wait_for_any()

    def clear(self) -> None:
        """Drops the exchanges in progress, after a failure or when their handles are void."""
        for running in self._running:
            running.exchange.close()
        self._running.clear()

    def _resume(self, running: _Running) -> None:
        """Continues an exchange with the result of its collective. Waits for it."""
        bucket = running.bucket
        with bucket.order.exchange_stream():
            results = [self.wait(handle) for handle in running.handles]
            try:
                with bucket.order, stage(running.stage):
                    request = running.exchange.send(results if len(results) > 1 else next(iter(results), None))
            except StopIteration:
                self._running.remove(running)
                return
            if isinstance(request, Request) and request.verb == "broadcast" and self.nodes.everyone.ordered:
                running.resumed(postponed=request)
            else:
                self._start(running, request)

    def _start(self, running: _Running, requests: Requests) -> None:
        running.resumed()
        for request in requests if isinstance(requests, tuple) else (requests,):
            collectives = self.nodes.level(request)
            self._stats.count_request(request, collectives.size)
            name = f"{self.label}.{running.bucket.index}.{request.name}.{running.collectives[request.name]}"
            with stage("exchange"):
                handle = collectives.start(request, name)
            running.started(request, handle)  # one by one: Horovod needs a handle as long as it has the tensor

    def _start_postponed(self) -> None:
        """Starts the broadcasts, in the order of the launches, if all exchanges have come to theirs."""
        if any(running.postponed is None for running in self._running):
            return
        for running in self._running:
            assert running.postponed is not None
            with running.bucket.order.exchange_stream():
                self._start(running, running.postponed)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A context whose time counts as spent waiting."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds_waited += time.perf_counter() - begin

    def _wait_for_any(self) -> None:
        with self.waiting(), stage("wait"):
            while not any(running.arrived for running in self._running):
                self._meanwhile()
                time.sleep(POLL_INTERVAL)

    def wait(self, handle: Handle) -> Tensor:
        """The result of a collective. Waits for it."""
        with self.waiting(), stage("wait"):
            while not (self.nodes.everyone.ordered or handle.done()):
                self._meanwhile()
                time.sleep(POLL_INTERVAL)
            return handle.result()
