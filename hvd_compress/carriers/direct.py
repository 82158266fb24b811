"""Collectives of Gloo on the CPU as messages from each rank to each other one: two trips, since a receiver first says
that it is ready. Gloo's allgather is a ring of N - 1 trips, and a group carries out two collectives at a time."""

import math
import threading
import weakref
from collections import deque
from contextlib import suppress

from torch import Tensor, distributed

#: The first tag, and their number: programs begin theirs with 0.
_TAGS = 2**30


class _Group:
    """The collectives of one process group that have not ended. They keep their tensors and works alive, also if nobody
    waits for them any more: Gloo closes all connections if the memory of a message is gone when it arrives."""

    def __init__(self) -> None:
        self.open, self._begun = dict[int, DirectHandle](), 0
        #: Threads wait one after another: two that wait for one message would count it twice.
        self.lock = threading.RLock()

    def begun(self, handle: "DirectHandle") -> int:
        """Returns the number of a collective that begins."""
        with self.lock:
            self._begun += 1
            self.open[self._begun] = handle
            return self._begun

    def ended(self, number: int) -> None:
        """Forgets a collective that has ended, and all before it. Each rank has started those, since it starts all in
        one order, so their messages are on their way."""
        for earlier in [n for n in self.open if n < number]:
            with suppress(RuntimeError):  # its own result() raises it again
                self.open[earlier].wait()
                del self.open[earlier]
        self.open.pop(number, None)  # unless a later one has ended before


_groups = weakref.WeakKeyDictionary[distributed.ProcessGroup, _Group]()


class DirectHandle:
    """A collective of a group: sends ``parts[r]`` to rank r, whose message is the r-th part of ``output``. All ranks
    start the collectives of a group in the same order."""

    def __init__(self, group: distributed.ProcessGroup, parts: list[Tensor], output: Tensor) -> None:
        rank, size, self._parts, self._output = distributed.get_rank(group), len(parts), parts, output
        self._works = deque[distributed.Work]()  # each as it is posted: the others' memory stays if one cannot be
        self._group = _groups.setdefault(group, _Group())
        self._number = self._group.begun(self)
        tag, rows = _TAGS + self._number % _TAGS, output.tensor_split(size)
        rows[rank].copy_(parts[rank])
        # In turns, so that ranks do not all send to the same one first. Receives first: Gloo sends at once what it
        # knows to be awaited.
        later = [(rank + turn) % size for turn in range(1, size if output.numel() else 1)]
        for peer in reversed(later):
            self._posted(distributed.irecv(rows[peer], group=group, group_src=peer, tag=tag))
        for peer in later:
            self._posted(distributed.isend(parts[peer], group=group, group_dst=peer, tag=tag))

    def _posted(self, work: distributed.Work | None) -> None:
        assert work is not None  # this process is in the group
        self._works.append(work)

    def done(self) -> bool:
        return False  # timing must not decide the order of collectives

    def result(self, timeout: float = math.inf) -> Tensor:
        """Waits as long as the process group's own timeout: Gloo closes all connections after another one, too."""
        with self._group.lock:
            self.wait()
            self._group.ended(self._number)
        return self._output

    def wait(self) -> None:
        """Waits for the messages, once for each: Gloo counts how often."""
        while self._works:
            if not self._works[0].wait():
                raise RuntimeError("a message of torch.distributed was aborted")
            self._works.popleft()
