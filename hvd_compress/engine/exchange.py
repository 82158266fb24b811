"""Runs exchanges: starts the collectives they yield and resumes them with the results."""

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .collectives import Handle, Nodes, Request, sum_of_parts
from .profiling import Stage, stage
from .streams import StreamOrder
from .wire_stats import WireStats

# Seconds between polls. Horovod looks for new work every millisecond, so shorter ones gain nothing.
POLL_INTERVAL = 200e-6

#: Yields a request, and is sent its result; or several that start together, for a list of results.
Exchange = Generator[Request | tuple[Request, ...], Any, Any]


def together(exchanges: Sequence[Exchange]) -> Generator[tuple[Request, ...], list[Tensor], list[Any]]:
    """Several exchanges as one: their first collectives start together, so that none waits for another on a link with a
    delay, then their second ones. Returns what they return. If one raises, those behind it get no result."""
    results, returned = dict[int, Any].fromkeys(range(len(exchanges))), [None] * len(exchanges)
    while True:
        asked = {}
        for number, result in results.items():
            try:
                asked[number] = exchanges[number].send(result)
            except StopIteration as end:
                returned[number] = end.value
        if not asked:
            return returned
        found = iter((yield tuple(request for one in asked.values() for request in _several(one))))
        results = {n: [next(found) for _ in one] if isinstance(one, tuple) else next(found) for n, one in asked.items()}


def _several(asked: Request | tuple[Request, ...]) -> tuple[Request, ...]:
    return asked if isinstance(asked, tuple) else (asked,)


def _ask(request: Request) -> Exchange:
    return (yield request)


@dataclass(eq=False)
class _Running:
    """An exchange in progress and the collectives it waits for.

    ``name``: begins those of its collectives. ``order``: of what is launched on streams for it.
    """

    name: str
    order: StreamOrder
    exchange: Generator[tuple[Request, ...], list[Tensor], None]
    #: What the exchange does when it is resumed.
    stage: Stage
    handles: list[Handle] = field(default_factory=list)
    collectives: Counter[str] = field(default_factory=Counter)
    #: The collective that it has asked for, if that is to start later.
    postponed: tuple[Request, ...] = ()

    def resumed(self, postponed: tuple[Request, ...] = ()) -> None:
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

    A collective's name is ``label``, that of the exchange, and its number among the exchange's collectives of one
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

    def launch(self, name: str, order: StreamOrder, exchange: Exchange, begins: Stage = "select") -> None:
        """Starts an exchange, to its first collective; never waits. ``order``: of its work; ``begins``: first stage."""
        running = _Running(name, order, self._carried(exchange), begins)
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
            if not running.postponed:
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

    def _carried(self, exchange: Exchange) -> Generator[tuple[Request, ...], list[Tensor], None]:
        """The exchange, in which a sum that its ranks cannot start is one of its parts."""
        results: Any = None
        while True:
            try:
                asked = exchange.send(results)
            except StopIteration:
                return
            results = yield from together([*map(self._performed, _several(asked))])
            if isinstance(asked, Request):
                (results,) = results

    def _performed(self, request: Request) -> Exchange:
        members, flat = self.nodes.level(request), request.level != "everyone" or self.nodes.inside is None
        # Of nodes, only some of the ranks of a ring send to another node.
        if request.verb != "allreduce" or not flat or members.sums(request.tensor):
            return _ask(request)
        return sum_of_parts(request, members.size)

    def _resume(self, running: _Running) -> None:
        """Continues an exchange with the result of its collective. Waits for it."""
        with running.order.exchange_stream():
            results = [self.wait(handle) for handle in running.handles]
            try:
                with running.order, stage(running.stage):
                    requests = running.exchange.send(results) if results else next(running.exchange)
            except StopIteration:
                self._running.remove(running)
                return
            if requests[0].verb == "broadcast" and self.nodes.everyone.ordered:
                running.resumed(postponed=requests)
            else:
                self._start(running, requests)

    def _start(self, running: _Running, requests: tuple[Request, ...]) -> None:
        running.resumed()
        for request in requests:
            members = self.nodes.level(request)
            self._stats.count_request(request, members.size, self.nodes.ranks if request.level == "everyone" else 1)
            name = f"{self.label}.{running.name}.{request.name}.{running.collectives[request.name]}"
            with stage("exchange"):
                handle = members.start(request, name)
            running.started(request, handle)  # one by one: Horovod needs a handle as long as it has the tensor

    def _start_postponed(self) -> None:
        """Starts the broadcasts, in the order of the launches, if all exchanges have come to theirs."""
        if not all(running.postponed for running in self._running):
            return
        for running in self._running:
            with running.order.exchange_stream():
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
