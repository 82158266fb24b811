"""N ranks in one process, one thread each: for tests and simulations."""

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

from ..engine.arguments import check_flag, check_integer, check_number
from ..engine.collectives import Handle, Nodes, Request
from ..engine.registry import Registry
from .nodes import divided, groups

T = TypeVar("T")
# More than the collectives between two rendezvous.
_APART = 1 << 32


class _Meeting:
    """One collective: the ranks' tensors, and the results once all ranks have started it."""

    def __init__(self, name: str, verb: str, size: int) -> None:
        self.name, self.verb = name, verb
        self.given: list[torch.Tensor | None] = [None] * size
        self.results: list[torch.Tensor] | None = None
        #: All ranks have started it, or one has failed.
        self.ended = threading.Event()

    def end(self, results: list[torch.Tensor]) -> None:
        self.results = results
        self.ended.set()


class _ThreadHandle:
    def __init__(self, meeting: _Meeting, rank: int, world: "ThreadWorld", name: str) -> None:
        self._meeting, self._rank, self._world, self._name = meeting, rank, world, name
        self._begin, self._timeout = time.monotonic(), world.timeout

    def done(self) -> bool:
        return not self._world.ordered and self._arrived()

    def result(self, timeout: float = math.inf) -> torch.Tensor:
        self._timeout = min(self._timeout, timeout)
        while not self._arrived():
            left = self._begin + self._timeout - time.monotonic()
            self._world.wait(self._meeting.ended, None if math.isinf(left) else max(left, 0.0))
        assert self._meeting.results is not None
        return self._meeting.results[self._rank]

    def _arrived(self) -> bool:
        self._world.check()
        if self._meeting.results is None and time.monotonic() > self._begin + self._timeout:
            missing = [rank for rank, tensor in enumerate(self._meeting.given) if tensor is None]
            raise TimeoutError(f"{self._name}: rank {self._rank} waited {self._timeout} s for ranks {missing}")
        return self._meeting.results is not None


class ThreadCollectives:
    """One rank of a :class:`ThreadWorld`, among some of its ranks."""

    def __init__(self, world: "ThreadWorld", rank: int, members: tuple[int, ...]) -> None:
        self._world, self._number, self._members = world, rank, members
        self.rank, self.size = members.index(rank), len(members)
        self.ordered, self.active = world.ordered, True
        self._started = self._checked_in = 0

    def generation(self) -> object:
        return self._world

    def registry(self) -> Registry:
        return self._world.registries[self._number]

    def sums(self, tensor: torch.Tensor) -> bool:
        return not self.ordered

    def may_differ(self, device: torch.device) -> bool:
        return self.ordered

    def realign(self) -> None:
        self._started = (self._started // _APART + 1) * _APART

    def start(self, request: Request, name: str) -> Handle:
        if request.rendezvous:  # the same one for all ranks, whatever they have started since the last
            self.realign()
        self._started += 1
        return self._world.join(request, name, self._members, self.rank, self._started if self.ordered else None)

    def check_in(self) -> Callable[[], list[int]]:
        counts, number = self._world.checked_in, self._checked_in
        self._checked_in += 1
        counts[self._members, number].add(self.rank)
        return lambda: [rank for rank in range(self.size) if rank not in counts[self._members, number]]

    def in_nodes(self, nodes: object) -> Nodes:
        """``nodes``: their number; True for one."""
        inside, between = groups(divided(1 if nodes is True else nodes, self.size), self.rank)
        part = partial(ThreadCollectives, self._world, self._number)
        ranks = self._members
        return Nodes(self, part(tuple(ranks[i] for i in between)), part(tuple(ranks[i] for i in inside)))


class ThreadWorld:
    """``size`` ranks, each in a thread of this process.

    Args:
        size: number of ranks, at least 1.
        timeout: seconds after which a wait raises ``TimeoutError`` and names the missing ranks.
        ordered: match collectives by the order of the calls, as torch.distributed does, and fail if their names differ;
            make sums as on Gloo, and let ranks differ up to a rendezvous. Otherwise by name, in any order, as Horovod.
        in_turn: one rank computes at a time, until it waits for a collective: faster than ranks that compete for the
            cores and the interpreter. Needs ``ordered``, where a rank waits without polling.
    """

    def __init__(self, size: int, timeout: float = 60.0, ordered: bool = False, in_turn: bool = False) -> None:
        self.size = check_integer("size", size, 1)
        self.timeout = check_number("timeout", timeout, above=0, infinite=True)
        self.ordered, in_turn = check_flag("ordered", ordered), check_flag("in_turn", in_turn)
        if in_turn and not ordered:
            raise ValueError("in_turn=True needs ordered=True")
        self._lock = threading.Lock()
        self._turns = threading.Semaphore(1 if in_turn else self.size)
        self._open: dict[tuple[tuple[int, ...], str], _Meeting] = {}
        #: By rank.
        self.registries = defaultdict[int, Registry](Registry)
        #: By members and number, the ranks that have checked in.
        self.checked_in = defaultdict[tuple[tuple[int, ...], int], set[int]](set)
        self._failure: BaseException | None = None

    def collectives(self, rank: int) -> ThreadCollectives:
        """The collectives of ``rank`` among all ranks."""
        return ThreadCollectives(self, check_integer("rank", rank, 0, self.size - 1), tuple(range(self.size)))

    def run(self, body: Callable[[int], T]) -> list[T]:
        """Calls ``body(rank)`` in a thread per rank; returns the results. The first error stops all, and is raised."""

        def guarded(rank: int) -> T:
            with self._turns:
                try:
                    return body(rank)
                except BaseException as error:
                    self._fail(error)
                    raise

        with ThreadPoolExecutor(self.size) as pool:
            ranks = [pool.submit(guarded, rank) for rank in range(self.size)]
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return [rank.result() for rank in ranks]

    def wait(self, event: threading.Event, timeout: float | None) -> None:
        """Waits for the event, or so many seconds, while another rank has the turn."""
        self._turns.release()
        try:
            event.wait(timeout)
        finally:
            self._turns.acquire()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or error
            for meeting in self._open.values():
                meeting.ended.set()

    def check(self) -> None:
        """Raises ``RuntimeError`` if another rank has failed."""
        if self._failure is not None:
            raise RuntimeError("another rank failed") from self._failure

    def join(
        self, request: Request, name: str, members: tuple[int, ...], rank: int, number: int | None = None
    ) -> Handle:
        """Starts a collective of some ranks on the ``rank``-th of them. ``number``: its place in the order of calls."""
        with self._lock:
            self.check()
            key = members, name if number is None else str(number)
            meeting = self._open.setdefault(key, _Meeting(name, request.verb, len(members)))
            if meeting.name != name:
                raise ValueError(f"ranks start collectives in different orders: {meeting.name} and {name}")
            if meeting.verb != request.verb:
                raise ValueError(f"{name}: one rank asks for an {meeting.verb}, rank {rank} for an {request.verb}")
            if meeting.given[rank] is not None:
                raise ValueError(f"rank {rank} started {name} twice")
            # Not copied: as in Horovod, the tensor is read once all ranks have started, and must not change before.
            meeting.given[rank] = request.tensor.detach()
            if all(tensor is not None for tensor in meeting.given):
                meeting.end(self._perform(request, name, meeting.given))
                del self._open[key]
        return _ThreadHandle(meeting, rank, self, name)

    def _perform(self, request: Request, name: str, given: list[torch.Tensor | None]) -> list[torch.Tensor]:
        tensors = [tensor for tensor in given if tensor is not None]
        size = len(tensors)
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
        if request.verb == "broadcast":
            return [tensors[request.root].clone() for _ in tensors]
        if request.verb == "reduce":
            total = torch.stack(tensors).sum(0)
            return [total if rank == request.root else torch.full_like(total, torch.nan) for rank in range(size)]
        if any(tensor.shape[0] % size for tensor in tensors):
            raise ValueError(f"{name}: the first dimension must be a multiple of {size} ranks")
        parts = [tensor.chunk(size) for tensor in tensors]
        return [torch.cat([part[rank] for part in parts]) for rank in range(size)]
