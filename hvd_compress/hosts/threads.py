"""N ranks in one process: the same three verbs between threads, for tests and simulations without Horovod."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from ..engine.collectives import Handle, Request

T = TypeVar("T")


class _Meeting:
    """One collective: the ranks' tensors as they come, and the results once all are here."""

    def __init__(self, verb: str, size: int) -> None:
        self.verb = verb
        self.given: list[torch.Tensor | None] = [None] * size
        self.results: list[torch.Tensor] | None = None


class _LocalHandle:
    def __init__(self, meeting: _Meeting, rank: int, world: "LocalWorld", name: str) -> None:
        self._meeting, self._rank, self._world, self._name = meeting, rank, world, name
        self._deadline = time.monotonic() + world.timeout

    def done(self) -> bool:
        self._world.check()
        if self._meeting.results is None and time.monotonic() > self._deadline:
            missing = [rank for rank, tensor in enumerate(self._meeting.given) if tensor is None]
            raise TimeoutError(f"{self._name}: rank {self._rank} waited {self._world.timeout} s for ranks {missing}")
        return self._meeting.results is not None

    def result(self) -> torch.Tensor:
        while not self.done():
            time.sleep(50e-6)
        assert self._meeting.results is not None
        return self._meeting.results[self._rank]


class LocalCollectives:
    """One rank's end of a :class:`LocalWorld`."""

    def __init__(self, world: "LocalWorld", rank: int) -> None:
        self._world, self._rank = world, rank

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._world.size

    @property
    def active(self) -> bool:
        return True

    def generation(self) -> object:
        return self._world

    def check_optimizer(self, optimizer: object) -> None:
        """Any will do."""

    def start(self, request: Request, name: str) -> Handle:
        return self._world.join(request, name, self._rank)


class LocalWorld:
    """``size`` ranks that live in threads of this process.

    Like Horovod, it matches collectives by name, in any order, and demands the same verb, and equal shapes for a sum.
    ``timeout``: seconds after which a wait raises ``TimeoutError`` and names the ranks that did not come.
    """

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        self.size, self.timeout = size, timeout
        self._lock = threading.Lock()
        self._open: dict[str, _Meeting] = {}
        self._failure: BaseException | None = None

    def collectives(self, rank: int) -> LocalCollectives:
        """The end that belongs to ``rank``."""
        return LocalCollectives(self, rank)

    def run(self, body: Callable[[int], T]) -> list[T]:
        """Calls ``body(rank)`` in a thread a rank and returns the results; the first exception ends all and is
        raised."""
        results: list[T | None] = [None] * self.size

        def guarded(rank: int) -> None:
            try:
                results[rank] = body(rank)
            except BaseException as error:
                if self._failure is None:
                    self._failure = error

        threads = [threading.Thread(target=guarded, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return results  # type: ignore[return-value]

    def check(self) -> None:
        """Raises ``RuntimeError`` if another rank has failed, so that nobody waits for it."""
        if self._failure is not None:
            raise RuntimeError("another rank failed") from self._failure

    def join(self, request: Request, name: str, rank: int) -> Handle:
        with self._lock:
            meeting = self._open.setdefault(name, _Meeting(request.verb, self.size))
            if meeting.verb != request.verb:
                raise ValueError(f"{name}: one rank asks for an {meeting.verb}, rank {rank} for an {request.verb}")
            if meeting.given[rank] is not None:
                raise ValueError(f"rank {rank} started {name} twice")
            # Not copied yet: like Horovod, it reads the tensor when all ranks are here, so nobody may change it
            # meanwhile.
            meeting.given[rank] = request.tensor.detach()
            if all(tensor is not None for tensor in meeting.given):
                del self._open[name]
                meeting.results = self._perform(request, name, meeting.given)
        return _LocalHandle(meeting, rank, self, name)

    def _perform(self, request: Request, name: str, given: list[torch.Tensor | None]) -> list[torch.Tensor]:
        tensors = [tensor for tensor in given if tensor is not None]
        if request.verb == "allreduce":
            shapes = {(tuple(tensor.shape), tensor.dtype) for tensor in tensors}
            if len(shapes) > 1:
                raise ValueError(f"{name}: ranks sum different shapes: {sorted(map(str, shapes))}")
            total = tensors[0].clone()
            for tensor in tensors[1:]:
                total += tensor
            return [total.clone() for _ in tensors]
        if request.verb == "allgather":
            return [torch.cat(tensors) for _ in tensors]
        if any(tensor.shape[0] % self.size for tensor in tensors):
            raise ValueError(f"{name}: the first dimension must be a multiple of {self.size} ranks")
        parts = [tensor.chunk(self.size) for tensor in tensors]
        return [torch.cat([part[rank] for part in parts]) for rank in range(self.size)]
