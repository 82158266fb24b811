"""Collectives as values: what an exchange asks for, and what a carrier must provide to perform it.

A method yields a :class:`Request`; the engine names it and passes it to the carrier's :class:`Collectives`, which
starts the operation without waiting.
"""

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch

from .profiling import Stage
from .registry import Registry

Verb = Literal["allreduce", "allgather", "alltoall", "reduce", "broadcast"]
Category = Literal["values", "indices", "dense_tensor", "budget"]
#: ``between``: across the network, between nodes or, without them, all ranks. ``inside``: within a node.
Level = Literal["everyone", "between", "inside"]

# The stage that a result usually begins.
_THEN: dict[Category, Stage] = {"values": "apply", "indices": "encode", "dense_tensor": "apply", "budget": "encode"}


@dataclass(frozen=True, eq=False)
class Request:
    """One collective on ``tensor``.

    ``category``: as what ``stats()`` counts its bytes, if they cross the network. ``level``: where they travel; all
    bytes inside a node count as ``inside``. ``name``: a collective that is not issued in every step needs its own;
    otherwise it would renumber the others. The shape under one name should be constant (Horovod's response cache).
    ``then``: what the exchange does with the result, for profiles. ``root``: the rank that receives a sum or sends its
    tensor to all. ``rendezvous``: ranks may be absent or in another call: after a wait that has timed out, the carrier
    must still work. ``following``: what will be asked for later, so that the carrier can be ready for the others'
    messages; its tensor may be filled until then.
    """

    verb: Verb
    tensor: torch.Tensor
    category: Category
    name: str = "step"
    then: Stage = "apply"
    root: int = 0
    level: Level = "between"
    rendezvous: bool = False
    following: tuple["Request", ...] = ()

    def wire_bytes(self, ranks: int) -> float:
        """Bytes that one rank sends with the ring algorithm, without transport headers."""
        return ring_bytes(self.verb, self.tensor.nbytes, ranks)


def ring_bytes(verb: Verb, size: int, ranks: int) -> float:
    """Bytes that one rank sends when each of ``ranks`` contributes ``size`` bytes."""
    if verb == "allgather":
        return (ranks - 1) * size
    share = (ranks - 1) / ranks
    return 2 * share * size if verb == "allreduce" else share * size


def allreduce(
    tensor: torch.Tensor, category: Category = "values", name: str = "step", then: Stage | None = None
) -> Request:
    """The sum over ranks. float16, float32, float64, int32 or int64, of one shape on all ranks; not modified."""
    return Request("allreduce", tensor, category, name, then or _THEN[category])


def allgather(tensor: torch.Tensor, category: Category = "indices", following: tuple[Request, ...] = ()) -> Request:
    """The tensors of all ranks, concatenated along the first dimension. Any dtype, of one shape on all ranks."""
    return Request("allgather", tensor, category, then=_THEN[category], following=following)


def rendezvous(row: torch.Tensor, following: tuple[Request, ...] = ()) -> Request:
    """An allgather in which ranks find out whether they are in the same call."""
    return Request("allgather", row, "budget", rendezvous=True, then=_THEN["budget"], following=following)


def alltoall(tensor: torch.Tensor, *following: Request) -> Request:
    """Rank r receives the r-th part of every rank's tensor, in rank order. The length is a multiple of the ranks."""
    return Request("alltoall", tensor, "values", then="reduce", following=following)


def sum_of_parts(request: Request, ranks: int) -> Generator[Request, torch.Tensor, torch.Tensor]:
    """An allreduce as an alltoall and an allgather, in as many bytes. Each part is summed by one rank, in the order of
    ranks: all have the same bits."""
    tensor = request.tensor
    flat = tensor.flatten()
    if len(flat) % ranks:
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % ranks))
    total = replace(request, verb="allgather", tensor=flat.new_zeros(len(flat) // ranks))
    parts = yield replace(request, verb="alltoall", tensor=flat, then="reduce", following=(total,))
    for part in parts.view(ranks, -1):
        total.tensor.add_(part)
    whole = yield total
    return whole[: tensor.numel()].view(tensor.shape)


def reduce(tensor: torch.Tensor, root: int, to_all: bool) -> Request:
    """Inside a node: the sum over its ranks, for rank ``root``. With ``to_all`` every rank gets it (Horovod has no
    reduce). float32; the tensor is overwritten."""
    return Request("allreduce" if to_all else "reduce", tensor, "dense_tensor", "node", "accumulate", root, "inside")


def broadcast(tensor: torch.Tensor, root: int) -> Request:
    """Inside a node: the tensor of rank ``root``. The other ranks pass one of the same shape, which is overwritten."""
    return Request("broadcast", tensor, "dense_tensor", "node", "apply", root, "inside")


class Handle(Protocol):
    """A collective in progress."""

    def done(self) -> bool:
        """Whether :meth:`result` would return without blocking the host. Never blocks. Where collectives are ordered,
        the answer must not depend on timing: it decides the order of later ones."""

    def result(self, timeout: float = math.inf) -> torch.Tensor:
        """Waits for the result; called once. ``TimeoutError`` after ``timeout`` seconds; or an error of the host."""


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
    def ordered(self) -> bool:
        """Whether collectives are matched by the order of the calls (torch.distributed) and not by name (Horovod)."""

    def generation(self) -> object:
        """An object that is replaced when the set of ranks changes (elastic); older handles are then void."""

    def registry(self) -> Registry:
        """The compressors of this process that exchange with these ranks."""

    def sums(self, tensor: torch.Tensor) -> bool:
        """Whether it can start an allreduce of ``tensor``; if not, :func:`sum_of_parts` takes its place."""

    def may_differ(self, device: torch.device) -> bool:
        """Whether ranks may start collectives on ``device`` that others never start, up to the next rendezvous."""

    def realign(self) -> None:
        """Called on all ranks after a rendezvous of different calls: nothing started since is part of what follows."""

    def start(self, request: Request, name: str) -> Handle:
        """Starts a collective without waiting."""

    def check_in(self) -> Callable[[], list[int]]:
        """Called at a place that all ranks pass equally often: tells the others, without waiting and without a
        collective, that this rank is there. Returns a function that returns the ranks that are not, or [] where the
        host cannot know them."""

    def in_nodes(self, nodes: object) -> "Nodes":
        """Divides the ranks into nodes; all must call it. ``nodes``, errors: as of :class:`hvd_compress.Compressor`."""


class Nodes:
    """The ranks on two levels: gradients are summed inside a node, and exchanged between nodes by one of its ranks.

    Args:
        everyone: all ranks.
        between: one rank of each node, with the same place there as this rank; without nodes, all ranks.
        inside: the ranks of this rank's node, or None without nodes.
        renew: called by all ranks when the set of ranks has changed (elastic): binds both levels to the new ranks.
    """

    def __init__(
        self,
        everyone: Collectives,
        between: Collectives | None = None,
        inside: Collectives | None = None,
        renew: Callable[[], None] = lambda: None,
    ) -> None:
        if inside is not None and inside.size == 1:
            inside = between = None
        self.everyone, self.between, self.inside, self.renew = everyone, between or everyone, inside, renew

    @property
    def ranks(self) -> int:
        """Ranks of a node."""
        return 1 if self.inside is None else self.inside.size

    @property
    def rank(self) -> int:
        """This rank's place in its node."""
        return 0 if self.inside is None else self.inside.rank

    def level(self, request: Request) -> Collectives:
        """The ranks that carry out a request. Raises ``ValueError`` for one inside a node if there are no nodes."""
        if request.level != "inside":
            return self.between if request.level == "between" else self.everyone
        if self.inside is None:
            raise ValueError(f"{request.verb} inside a node: the compressor was built without nodes=")
        return self.inside
