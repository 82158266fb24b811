"""Runs exchanges: starts the collectives they yield and resumes them with the results."""

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from .bucket import Bucket
from .collectives import Handle, Nodes, Request
from .profiling import Stage, stage
from .wire_stats import WireStats

# Seconds between polls. Horovod looks for new work every millisecond; polling much faster only costs CPU time.
POLL_INTERVAL = 200e-6

Exchange = Generator[Request, Tensor, None]


@dataclass(eq=False)
class _Running:
    """An exchange in progress and the collective it waits for."""

    bucket: Bucket
    exchange: Exchange
    handle: Handle | None = None
    #: What the exchange does when it is resumed.
    stage: Stage = "select"
    collectives: Counter[str] = field(default_factory=Counter)
    #: The collective that it has asked for, and that waits for those of the others.
    held: Request | None = None

    def hold(self, request: Request) -> None:
        """The exchange has asked for this collective, which starts later."""
        self.handle, self.held = None, request

    def started(self, request: Request, handle: Handle) -> None:
        """The exchange waits for this collective."""
        self.handle, self.held, self.stage = handle, None, request.then
        self.collectives[request.name] += 1


class Exchanges:
    """All exchanges of a step.

    A collective's name is ``label``, its bucket, and its number among the exchange's collectives of one
    ``Request.name``: the same in every step, as Horovod's response cache requires.

    Where collectives are matched by name, exchanges are resumed as their collectives finish. Where they are matched by
    the order of calls, the order must not depend on timing: exchanges are resumed in the order of their launches, one
    collective each in turn. There the broadcasts inside a node, before which an owner has more collectives to wait for
    than the others, start when all exchanges have come so far.

    ``meanwhile`` is called again and again while all of them wait.
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
            while running in self._running and running.handle and running.handle.done():
                self._resume(running)
                advanced = True
        return advanced

    def take_turns(self) -> None:
        """For a caller that comes again: resumes exchanges without waiting, where collectives are matched by name. Else
        each exchange once, with the result of its collective, for which it waits: all ranks start the next ones in
        the same order if they call this equally often."""
        if not self.nodes.everyone.ordered:
            self.advance()
            return
        for running in list(self._running):
            if running.held is None:
                self._resume(running)

    def finish(self) -> None:
        """Runs all exchanges to their ends."""
        while self._running:
            if self.nodes.everyone.ordered:
                self.take_turns()
                self._start_held()
            elif not self.advance():
                self._wait_for_any()

    def clear(self) -> None:
        """Ends the exchanges in progress where they are, after a failure or when their handles are void."""
        for running in self._running:
            running.exchange.close()
        self._running.clear()

    def _resume(self, running: _Running) -> None:
        """Continues an exchange with the result of its collective, for which it waits."""
        bucket = running.bucket
        with bucket.order.exchange_stream():
            result = None if running.handle is None else self.wait(running.handle)
            try:
                with bucket.order, stage(running.stage):
                    request = running.exchange.send(result)  # type: ignore[arg-type]
            except StopIteration:
                self._running.remove(running)
                return
            if request.verb == "broadcast" and self.nodes.everyone.ordered:
                running.hold(request)
            else:
                self._start(running, request)

    def _start(self, running: _Running, request: Request) -> None:
        collectives = self.nodes.level(request)
        self._stats.count_request(request, collectives.size)
        name = f"{self.label}.{running.bucket.index}.{request.name}.{running.collectives[request.name]}"
        with stage("exchange"):
            handle = collectives.start(request, name)
        running.started(request, handle)

    def _start_held(self) -> None:
        """If all exchanges have come to their broadcast: starts them, in the order of the launches."""
        if any(running.held is None for running in self._running):
            return
        for running in self._running:
            assert running.held is not None
            with running.bucket.order.exchange_stream():
                self._start(running, running.held)

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
            while not any(running.handle and running.handle.done() for running in self._running):
                self._meanwhile()
                time.sleep(POLL_INTERVAL)

    def wait(self, handle: Handle) -> Tensor:
        """The result of a collective, for which it waits."""
        with self.waiting(), stage("wait"):
            while not (self.nodes.everyone.ordered or handle.done()):
                self._meanwhile()
                time.sleep(POLL_INTERVAL)
            return handle.result()
