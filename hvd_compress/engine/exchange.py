"""Runs exchanges: starts what they yield, resumes them when it is done, and waits only when told to."""

import time
from collections import Counter
from collections.abc import Generator
from contextlib import nullcontext

import torch
from torch import Tensor

from .bucket import Bucket
from .collectives import Collectives, Handle, Request
from .wire_stats import Traffic

# Seconds. Horovod itself looks for work once a millisecond, unless told otherwise: to look much more often than that
# costs the processor more than it gains.
_NAP = 200e-6

Exchange = Generator[Request, Tensor, None]


class _Running:
    """An exchange under way: its generator and what it waits for."""

    def __init__(self, bucket: Bucket, exchange: Exchange) -> None:
        self.bucket, self.exchange = bucket, exchange
        self.stages: Counter[str] = Counter()
        self.handle: Handle | None = None


class Driver:
    """All exchanges of a step. ``label`` begins the names of their collectives, the same on all ranks.

    A collective is named by its bucket and its place among the exchange's collectives of that ``Request.name``: names
    are the same in every step, as Horovod's response cache wants them, and ranks may start them in any order.
    """

    def __init__(self, collectives: Collectives, traffic: Traffic, label: str) -> None:
        self._collectives, self._traffic, self._label = collectives, traffic, label
        self._running: list[_Running] = []
        #: Seconds spent waiting so far.
        self.waited = 0.0

    def launch(self, bucket: Bucket, exchange: Exchange) -> None:
        """Starts an exchange, up to its first collective. Never waits."""
        running = _Running(bucket, exchange)
        self._running.append(running)
        self._resume(running, None)

    def advance(self) -> bool:
        """Resumes every exchange whose collective is done, without waiting; True if there was any."""
        moved = False
        for running in list(self._running):
            while running in self._running and running.handle is not None and running.handle.done():
                self._resume(running, running.handle.result())
                moved = True
        return moved

    def finish(self) -> None:
        """Runs all exchanges to their ends, in whatever order their collectives finish."""
        while self._running:
            if not self.advance():
                asleep = time.perf_counter()
                time.sleep(_NAP)
                self.waited += time.perf_counter() - asleep

    def abandon(self) -> None:
        """Forgets the exchanges under way: after a failure, or when their handles are void."""
        for running in self._running:
            running.exchange.close()
        self._running.clear()

    def _resume(self, running: _Running, result: Tensor | None) -> None:
        bucket = running.bucket
        with torch.cuda.device(bucket.device) if bucket.device.type == "cuda" else nullcontext():
            bucket.order.enter()
            try:
                request = next(running.exchange) if result is None else running.exchange.send(result)
            except StopIteration:
                self._running.remove(running)
                return
            finally:
                bucket.order.leave()
            self._traffic.count_request(request, self._collectives.size)
            name = f"{self._label}.{bucket.index}.{request.name}.{running.stages[request.name]}"
            running.handle = self._collectives.start(request, name)
            running.stages[request.name] += 1
