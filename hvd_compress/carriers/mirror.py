"""Rank 0 of many in a process alone, to measure a compressor: the other ranks are simulated as sending the same."""

import math
import time
from collections.abc import Callable

import torch

from ..engine.collectives import Nodes, Request
from .plain import PlainCollectives


class _Done:
    def __init__(self, result: torch.Tensor) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def result(self, timeout: float = math.inf) -> torch.Tensor:
        return self._result


class Mirror(PlainCollectives):
    """The collectives of rank 0 of ``size`` ranks that all send the same. ``seconds``: time spent on the simulation so
    far, by ``clock``."""

    rank, active, ordered = 0, True, False

    def __init__(self, size: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.size, self.clock, self.seconds = size, clock, 0.0

    def generation(self) -> object:
        return Mirror

    def in_nodes(self, nodes: object) -> Nodes:
        """Each rank is a node."""
        return Nodes(self)

    def sums(self, tensor: torch.Tensor) -> bool:
        return True

    def start(self, request: Request, name: str) -> _Done:
        begin, given = self.clock(), request.tensor
        if request.verb == "allreduce":
            result = given * self.size
        elif request.verb == "allgather":
            result = given.repeat(self.size, *[1] * (given.dim() - 1))
        else:  # its own part, from every rank
            result = given.view(self.size, -1)[0].repeat(self.size)
        self.seconds += self.clock() - begin
        return _Done(result)
