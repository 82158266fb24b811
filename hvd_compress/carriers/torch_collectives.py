"""``torch.distributed`` as the carrier of bytes. It matches collectives by order, which must not depend on timing."""

import math
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh

from ..engine.collectives import Handle, Nodes, Request, allgather
from .direct import Direct
from .nodes import divided, groups
from .plain import PlainCollectives
from .polling import wait_until

_all_gather = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)  # renamed in torch 2.13

#: The groups of nodes and of places in nodes, by the group that they divide.
_groups = weakref.WeakKeyDictionary[distributed.ProcessGroup, dict[tuple[int, ...], distributed.ProcessGroup]]()

#: How often this process has checked in, by group.
_checked_in = weakref.WeakKeyDictionary[distributed.ProcessGroup, int]()

#: ``nodes`` that is no number of nodes, as a number, and how an error calls it.
_STARTED, _MESH, _WRONG = 0, -1, -2
_GIVEN = {_STARTED: "True", _MESH: "a mesh", _WRONG: "an invalid one"}


def backends() -> list[str]:
    """The backends that this torch can use here."""
    if not distributed.is_available():
        return []
    found = {"gloo": distributed.is_gloo_available, "nccl": distributed.is_nccl_available}
    found |= {"mpi": distributed.is_mpi_available, "ucc": distributed.is_ucc_available}
    return [name for name, available in found.items() if available()]


def _store() -> Any:
    """The store that all ranks of this job read and write; None if this torch has it at another place."""
    found = getattr(distributed.distributed_c10d, "_get_default_store", None)  # there is no public way
    return None if found is None else found()


def _missing(store: Any, keys: list[str]) -> list[int]:
    """The positions of the keys that the store does not have; none if it does not answer."""
    try:
        return [position for position, key in enumerate(keys) if not store.check([key])]
    except RuntimeError:
        return []


class _TorchHandle:
    def __init__(self, work: distributed.Work, output: Tensor, on_stream: bool) -> None:
        self._work, self._output, self._on_stream = work, output, on_stream

    def done(self) -> bool:
        # NCCL: waiting blocks the stream, not the host. Gloo: completion depends on timing, which differs between ranks
        # and must not decide the order of collectives.
        return self._on_stream

    def result(self, timeout: float = math.inf) -> Tensor:
        if not math.isinf(timeout):
            wait_until(self._work.is_completed, timeout, "torch.distributed")
        self._work.wait()
        return self._output


class TorchCollectives(PlainCollectives):
    """``torch.distributed`` on a process group (default: the whole world)."""

    ordered = True
    active = True

    def __init__(self, process_group: distributed.ProcessGroup | None = None) -> None:
        self.group = distributed.group.WORLD if process_group is None else process_group
        self.rank, self.size = distributed.get_rank(self.group), distributed.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError("this process is not in process_group")
        torchcomms = os.environ.get("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "0") != "0"
        gloo = not torchcomms and "cpu:gloo" in distributed.get_backend_config(self.group).split(",")
        #: Messages from each rank to each other one, for tensors of the CPU.
        self._direct = Direct.of(self.group) if gloo and self.group and self.size > 1 else None

    @property
    def ranks(self) -> list[int]:
        """The group's ranks in the whole world."""
        return distributed.get_process_group_ranks(self.group)

    def generation(self) -> object:
        return self.group

    def sums(self, tensor: Tensor) -> bool:
        return not self.may_differ(tensor.device)

    def may_differ(self, device: torch.device) -> bool:
        return self._direct is not None and device.type == "cpu"

    def realign(self) -> None:
        if self._direct is not None:
            self._direct.meet(())

    def start(self, request: Request, name: str) -> Handle:
        tensor = request.tensor
        if self._direct is not None and tensor.is_cpu and request.verb in ("allgather", "alltoall"):
            return self._meet(request, self._direct) if request.rendezvous else self._direct.start(request)
        if request.verb == "allreduce":
            output = tensor.clone()
            work = distributed.all_reduce(output, group=self.group, async_op=True)
        elif request.verb == "allgather":
            output = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
            work = _all_gather(output, tensor, group=self.group, async_op=True)
        elif request.verb == "reduce":
            output = tensor
            work = distributed.reduce(output, group=self.group, group_dst=request.root, async_op=True)
        elif request.verb == "broadcast":
            output = tensor
            work = distributed.broadcast(output, group=self.group, group_src=request.root, async_op=True)
        else:
            output = torch.empty_like(tensor)
            work = distributed.all_to_all_single(output, tensor, group=self.group, async_op=True)
        assert work is not None
        return _TorchHandle(work, output, output.is_cuda and "nccl" in distributed.get_backend(self.group))

    def _meet(self, request: Request, direct: Direct) -> Handle:
        """Starts an allgather as Gloo's alltoall: it sends direct messages, too, and connections survive a timeout."""
        row, size = request.tensor.contiguous(), self.size
        output = row.new_empty((size * row.shape[0], *row.shape[1:]))
        direct.meet(request.following)
        work = distributed.all_to_all_single(output, torch.cat([row] * size), group=self.group, async_op=True)
        assert work is not None
        return _TorchHandle(work, output, on_stream=False)

    def check_in(self) -> Callable[[], list[int]]:
        store = _store()
        if store is None or self.group is None:
            return list
        ranks, number = self.ranks, _checked_in.get(self.group, 0)
        _checked_in[self.group] = number + 1
        keys = [f"hvd_compress/{self.group.group_name}/{number}/{rank}" for rank in range(len(ranks))]
        try:
            store.set(keys[self.rank], "")
        except RuntimeError:  # rank 0's process, which keeps the store, has ended
            return list
        return lambda: _missing(store, keys)

    def in_nodes(self, nodes: object) -> Nodes:
        """Makes process groups, of the backend of this one, unless ``nodes`` is a mesh that has them. Errors are raised
        on all ranks, also if they were given different ``nodes``."""
        failure, chosen, node = None, _WRONG, 0
        try:
            chosen, node = self._choice(nodes)
        except (TypeError, ValueError) as error:
            failure = error
        found = self._gathered([chosen, node])
        if failure is not None:
            raise failure
        everyone = found[::2]
        if len({*everyone}) > 1:
            given = ", ".join(_GIVEN.get(theirs) or str(theirs) for theirs in everyone)
            raise ValueError(f"nodes must be the same on all ranks, got {given} on ranks 0 to {self.size - 1}")
        if isinstance(nodes, DeviceMesh):
            return self._of_mesh(nodes)
        inside, between = groups(found[1::2], self.rank)
        return Nodes(self, inside=self._among(inside), between=self._among(between))

    def _choice(self, nodes: object) -> tuple[int, int]:
        """Returns ``nodes`` as a number, and this rank's node."""
        if isinstance(nodes, DeviceMesh):
            return _MESH, 0
        if nodes is True:
            return _STARTED, self._first_of_node()
        node_of = divided(nodes, self.size)
        return max(node_of) + 1, node_of[self.rank]

    def _of_mesh(self, mesh: DeviceMesh) -> Nodes:
        ours, theirs = distributed.get_process_group_ranks(self.group), mesh.mesh.flatten().tolist()
        if mesh.ndim != 2 or sorted(ours) != sorted(theirs):
            raise ValueError(
                f"the mesh of nodes must have the dimensions node and GPU and the ranks {ours}, got {mesh!r:.200}"
            )
        between, inside = (TorchCollectives(mesh.get_group(dimension)) for dimension in (0, 1))
        return Nodes(self, between, inside)

    def _first_of_node(self) -> int:
        """The first rank of this rank's node, as started by torchrun."""
        local = os.environ.get("LOCAL_RANK", "")
        if not local.isdigit():
            raise ValueError("nodes=True needs LOCAL_RANK, which torchrun sets: give the number of nodes")
        return distributed.get_rank() - int(local)

    def _gathered(self, own: list[int]) -> list[int]:
        """Gathers by a tensor: ``all_gather_object()`` needs NumPy, which torch does not require."""
        nccl = "nccl" in distributed.get_backend(self.group)
        device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        tensor = torch.tensor(own, dtype=torch.int64, device=device)
        return list(self.start(allgather(tensor), "hvd_compress.nodes").result().tolist())

    def _among(self, ranks: list[int]) -> "TorchCollectives":
        """The collectives of some of these ranks, on a group that is made once."""
        assert self.group is not None
        known, members = _groups.setdefault(self.group, {}), tuple(ranks)
        if members not in known:
            everyone = distributed.get_process_group_ranks(self.group)
            known[members] = distributed.new_group(
                [everyone[r] for r in ranks],
                backend=distributed.get_backend(self.group),
                use_local_synchronization=True,
            )
        return TorchCollectives(known[members])
