"""Collectives of Gloo on the CPU as messages from each rank to each other one. Gloo's allgather is a ring of N - 1
trips, its sum one of 2 (N - 1), and a group carries out two collectives at a time.

A message takes one trip if its receiver has said before that it is ready, and two or three otherwise: so the receives
of what will follow are posted together with those of what is asked for now.
"""

import math
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

from torch import Tensor, distributed

from ..engine.collectives import Request

#: The first tag, and their number: programs begin theirs with 0.
_TAGS = 2**30
#: More than the collectives between two rendezvous.
_APART = 2**12


class Direct:
    """The direct messages of one process group. All ranks start its collectives in the same order.

    What has not ended is kept, also if nobody waits for it any more: Gloo closes all connections if the memory of a
    message is gone when it arrives.
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group, self.rank, self.size = weakref.ref(group), group.rank(), group.size()
        #: In turns, so that ranks do not all send to the same one first.
        self.peers = [(self.rank + turn) % self.size for turn in range(1, self.size)]
        #: The last collective's number, which its messages have as a tag.
        self._begun = 0
        #: Those that are sent and have not ended, in the order of their starts; those whose receives are posted.
        self.sent, self.awaited = list[DirectHandle](), dict[Request, DirectHandle]()
        #: Those that were sent before the last rendezvous: some ranks may never start them, so nobody waits for them
        #: but their own result().
        self.before = set[DirectHandle]()
        #: Threads wait one after another: two that wait for one message would count it twice.
        self.lock = threading.RLock()

    @classmethod
    def of(cls, group: distributed.ProcessGroup) -> "Direct":
        """The one object of a group."""
        if group not in _groups:
            _groups[group] = cls(group)
        return _groups[group]

    @property
    def group(self) -> distributed.ProcessGroup:
        group = self._group()
        assert group is not None  # the carrier has it
        return group

    def meet(self, following: Iterable[Request]) -> None:
        """Called at each rendezvous: what follows has the same numbers on all ranks, whatever was started before."""
        with self.lock:
            self._begun = (self._begun // _APART + 1) * _APART
            self.before.update(self.sent)
            self.sent.clear()
            for request in following:
                self._await(request)

    def start(self, request: Request) -> "DirectHandle":
        """Starts an allgather or alltoall of a CPU tensor. ``ValueError`` for an alltoall that cannot be divided."""
        with self.lock:
            if request not in self.awaited:
                self._await(request)
            self.sent.append(handle := self.awaited.pop(request))
            tensor = request.tensor.contiguous()
            handle.send([*tensor.tensor_split(self.size)] if request.verb == "alltoall" else [tensor] * self.size)
        return handle

    def _await(self, request: Request) -> None:
        """Posts the receives of a collective, and of those that will follow."""
        rows, *shape = request.tensor.shape
        if request.verb == "alltoall" and rows % self.size:
            raise ValueError(f"an alltoall of {rows} entries cannot be divided among {self.size} ranks")
        self._begun += 1
        rows = rows if request.verb == "alltoall" else rows * self.size
        self.awaited[request] = handle = DirectHandle(self, self._begun, request.tensor.new_empty(rows, *shape))
        handle.receive()
        for following in request.following:
            self._await(following)

    def ended(self, handle: "DirectHandle") -> None:
        """Forgets a collective that has ended, and those since the last rendezvous that come before it, which were
        dropped. Each rank has started these, so their messages are on their way."""
        self.before.discard(handle)
        while handle in self.sent:
            with suppress(RuntimeError):  # its own result() raises it again
                self.sent[0].wait()
            self.sent.pop(0)


_groups = weakref.WeakKeyDictionary[distributed.ProcessGroup, Direct]()


class DirectHandle:
    """A collective in progress. The r-th part of its result comes from rank r."""

    def __init__(self, direct: Direct, number: int, output: Tensor) -> None:
        self._direct, self._output, self._rows = direct, output, output.tensor_split(direct.size)
        self._peers = direct.peers if output.numel() else []
        self._tag = _TAGS + number % _TAGS
        self._works = deque[distributed.Work]()  # each as it is posted: the others' memory stays if one cannot be

    def receive(self) -> None:
        """Posts the receives."""
        for peer in reversed(self._peers):
            self._works.append(self._direct.group.recv([self._rows[peer]], peer, self._tag))

    def send(self, parts: list[Tensor]) -> None:
        """Sends ``parts[r]`` to rank r."""
        self._parts, direct = parts, self._direct
        self._rows[direct.rank].copy_(parts[direct.rank])
        for peer in self._peers:
            self._works.append(direct.group.send([parts[peer]], peer, self._tag))

    def done(self) -> bool:
        return False  # timing must not decide the order of collectives

    def result(self, timeout: float = math.inf) -> Tensor:
        """Waits as long as the process group's own timeout: Gloo closes all connections after another one, too."""
        with self._direct.lock:
            self.wait()
            self._direct.ended(self)
        return self._output

    def wait(self) -> None:
        """Waits for the messages, once for each: Gloo counts how often."""
        while self._works:
            if not self._works[0].wait():
                raise RuntimeError("a message of torch.distributed was aborted")
            self._works.popleft()
