"""Collectives as values: what an exchange asks for, and what a host must provide to carry it out.

A method yields a :class:`Request`; the engine names it and passes it to the host's :class:`Collectives`, which starts
the operation without waiting.
"""

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from .profiling import Stage
from .registry import Registry

#: Who passes gradients in.
HostName = Literal["horovod", "ddp"]
Verb = Literal["allreduce", "allgather", "alltoall"]
Kind = Literal["values", "indices", "dense_tensor", "budget"]

# The stage that a result usually begins.
_THEN: dict[Kind, Stage] = {"values": "apply", "indices": "encode", "dense_tensor": "apply", "budget": "encode"}


@dataclass(frozen=True)
class Request:
    """One collective on ``tensor``, and the category in which ``stats()`` counts its bytes.

    ``name``: a collective that is not issued in every step needs its own; otherwise it would renumber the others. The
    shape under one name should be constant (Horovod's response cache). ``then``: what the exchange does with the
    result, for profiles.
    """

    verb: Verb
    tensor: torch.Tensor
    kind: Kind
    name: str = "step"
    then: Stage = "apply"

    def wire_bytes(self, ranks: int) -> float:
        """Bytes that one rank sends with the ring algorithm, without transport headers."""
        return ring_bytes(self.verb, self.tensor.nbytes, ranks)


def ring_bytes(verb: Verb, size: int, ranks: int) -> float:
    """Bytes that one rank sends when each of ``ranks`` contributes ``size`` bytes."""
    if verb == "allgather":
        return (ranks - 1) * size
    share = (ranks - 1) / ranks
    return 2 * share * size if verb == "allreduce" else share * size


def allreduce(tensor: torch.Tensor, kind: Kind = "values", name: str = "step", then: Stage | None = None) -> Request:
    """The sum over ranks. float16, float32, float64, int32 or int64, of one shape on all ranks; not modified."""
    return Request("allreduce", tensor, kind, name, then or _THEN[kind])


def allgather(tensor: torch.Tensor, kind: Kind = "indices", then: Stage | None = None) -> Request:
    """The tensors of all ranks, concatenated along the first dimension. Any dtype, of one shape on all ranks."""
    return Request("allgather", tensor, kind, then=then or _THEN[kind])


def alltoall(tensor: torch.Tensor, kind: Kind = "values", then: Stage = "reduce") -> Request:
    """Rank r receives the r-th part of every rank's tensor, in rank order. The length is a multiple of the ranks."""
    return Request("alltoall", tensor, kind, then=then)


class Handle(Protocol):
    """A collective in progress."""

    def done(self) -> bool:
        """Whether :meth:`result` would return without blocking the host. Never blocks. Where collectives are ordered,
        the answer must not depend on timing: it decides the order of later ones."""

    def result(self, timeout: float = math.inf) -> torch.Tensor:
        """Waits for the result. To be called once. Raises ``TimeoutError`` after ``timeout`` seconds, if the host's own
        limit is not shorter."""


class Collectives(Protocol):
    """A set of ranks that exchange tensors."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def active(self) -> bool:
        """Whether gradients are exchanged at all: Horovod's optimizer skips the exchange with one process."""

    @property
    def host(self) -> HostName:
        """Who passes the gradients in."""

    @property
    def ordered(self) -> bool:
        """Whether collectives are matched by the order of the calls (torch.distributed) and not by name (Horovod)."""

    def generation(self) -> object:
        """An object that is replaced when the set of ranks changes (elastic); older handles are then void."""

    def registry(self) -> Registry:
        """This process's compressors that exchange with these ranks."""

    def start(self, request: Request, name: str) -> Handle:
        """Starts a collective without waiting."""
