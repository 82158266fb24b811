"""Horovod behind three verbs.

A method describes what must cross the network as a :class:`Request` and yields it; the driver gives it a name and
hands it to a :class:`Collectives`, which starts it without waiting. Nothing else in the package knows Horovod.
"""

import os
import time
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

Verb = Literal["allreduce", "allgather", "alltoall"]
Kind = Literal["values", "indices", "dense_tensor", "budget"]


@dataclass(frozen=True)
class Request:
    """A tensor that wants to cross the network: by which verb, and what it counts as in ``stats()``.

    ``name``: of what is not sent in every step, so that it shifts no other's name; names stand for constant shapes.
    """

    verb: Verb
    tensor: torch.Tensor
    kind: Kind
    name: str = "step"

    def wire_bytes(self, ranks: int) -> float:
        """Bytes that one rank sends, by the ring algorithm (headers of the transport apart)."""
        return ring_bytes(self.verb, self.tensor.nbytes, ranks)


def ring_bytes(verb: Verb, size: int, ranks: int) -> float:
    """Bytes that one rank sends when each of ``ranks`` contributes ``size`` bytes."""
    if verb == "allgather":
        return (ranks - 1) * size
    share = (ranks - 1) / ranks
    return 2 * share * size if verb == "allreduce" else share * size


def allreduce(tensor: torch.Tensor, kind: Kind = "values", name: str = "step") -> Request:
    """The sum over ranks; float16, float32, float64, int32 or int64, of one shape on all ranks. ``tensor`` stays as
    it is."""
    return Request("allreduce", tensor, kind, name)


def allgather(tensor: torch.Tensor, kind: Kind = "indices") -> Request:
    """All ranks' tensors one after the other along the first dimension; any dtype that Horovod knows."""
    return Request("allgather", tensor, kind)


def alltoall(tensor: torch.Tensor, kind: Kind = "values") -> Request:
    """The r-th part of every rank's tensor, on rank r, in rank order; the length is a multiple of the ranks."""
    return Request("alltoall", tensor, kind)


class Handle(Protocol):
    """A collective under way."""

    def done(self) -> bool:
        """Whether :meth:`result` would return at once. Never blocks."""

    def result(self) -> torch.Tensor:
        """The result; to be called once, when done (or it blocks)."""


class Collectives(Protocol):
    """A set of ranks that exchange tensors. All ranks start the same names; the order is free."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def active(self) -> bool:
        """Whether the compressor is called: Horovod's optimizer exchanges nothing in a process alone."""

    def generation(self) -> object:
        """An object that is replaced when the ranks are formed anew (elastic); all handles before it are void."""

    def start(self, request: Request, name: str) -> Handle:
        """Starts a collective without waiting."""

    def check_optimizer(self, optimizer: Any) -> None:
        """Raises ``ValueError`` if ``optimizer`` exchanges its gradients by other rules than this does."""


class _HorovodHandle:
    def __init__(self, number: int) -> None:
        import horovod.torch as hvd

        self._number = number
        # Asked often: not by way of an import.
        self._poll = hvd.poll

    def done(self) -> bool:
        return bool(self._poll(self._number))

    def result(self) -> torch.Tensor:
        import horovod.torch as hvd

        # hvd.synchronize spins on a whole core: wait politely first.
        while not self.done():
            time.sleep(50e-6)
        output = hvd.synchronize(self._number)
        # alltoall also returns how much came from each rank; ours are of equal parts.
        result: torch.Tensor = output[0] if isinstance(output, tuple) else output
        if result.is_cuda:
            stream = torch.cuda.current_stream(result.device)
            if os.environ.get("HOROVOD_ENABLE_ASYNC_COMPLETION"):
                # Then Horovod makes the default stream wait for its work, whichever this is.
                stream.wait_stream(torch.cuda.default_stream(result.device))
            # Horovod allocated it on a stream of its own; until ours is done with it, it must not be used again.
            result.record_stream(stream)
        return result


class HorovodCollectives:
    """Stock ``horovod.torch`` on a process set. Raises what Horovod raises (``HorovodInternalError``,
    ``ValueError``)."""

    def __init__(self, process_set: Any = None) -> None:
        import horovod.torch as hvd
        from horovod.torch import mpi_ops

        self._set = hvd.global_process_set if process_set is None else process_set
        # Asked for with every gradient, or step: not by way of an import.
        self._hvd, self._module = hvd, mpi_ops

    @property
    def rank(self) -> int:
        """0 in a process that is none of the set's, where the optimizer exchanges nothing."""
        return 0 if self._set.included() is False else int(self._set.rank())

    @property
    def size(self) -> int:
        return 1 if self._set.included() is False else int(self._set.size())

    @property
    def active(self) -> bool:
        # As the optimizer itself decides when it is built.
        return bool(self._set.included()) and (self._hvd.size() > 1 or os.environ.get("HOROVOD_ELASTIC") == "1")

    def generation(self) -> object:
        # hvd.init() makes a new table; a handle of the old one may name somebody else's operation in the new.
        table: object = self._module._handle_map
        return table

    def start(self, request: Request, name: str) -> Handle:
        import horovod.torch as hvd

        if request.verb == "allreduce":
            handle = hvd.allreduce_async(request.tensor, name=name, op=hvd.Sum, process_set=self._set)
        elif request.verb == "allgather":
            handle = hvd.allgather_async(request.tensor, name=name, process_set=self._set)
        else:
            handle = hvd.alltoall_async(request.tensor, name=name, process_set=self._set)
        return _HorovodHandle(handle)

    def check_optimizer(self, optimizer: Any) -> None:
        import horovod.torch as hvd

        if not hasattr(optimizer, "_compression"):
            return  # the optimizer inside Horovod's
        op, own = getattr(optimizer, "op", hvd.Average), getattr(optimizer, "process_set", self._set)
        if op != hvd.Average:
            raise ValueError("compression averages: DistributedOptimizer's op must be hvd.Average, its default")
        if own.process_set_id != self._set.process_set_id:
            raise ValueError(
                f"DistributedOptimizer works on process set {own.process_set_id} and its compressor on "
                f"{self._set.process_set_id}: give both the same process_set="
            )
