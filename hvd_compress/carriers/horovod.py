"""Horovod as the carrier of bytes. It matches collectives by name, in any order."""

import functools
import math
import os
import weakref
from typing import Any

import torch
from torch import Tensor

from ..engine.collectives import Handle, Nodes, Request, allgather
from ..engine.registry import Registry
from .nodes import divided, table
from .plain import PlainCollectives
from .polling import wait_until


class _Registries:
    """The registry of each process set."""

    def __init__(self) -> None:
        self._everywhere = weakref.WeakValueDictionary[int, Any]()
        self._generation: object = None

    def of(self, process_set: Any, generation: object) -> Registry:
        """Returns a set's registry, a new one for new ranks, which begin to count at 0."""
        if generation is not self._generation:
            self._generation = generation
            self._by_set = weakref.WeakKeyDictionary[Any, Registry]()
        return self._by_set.setdefault(process_set, Registry(self._everywhere))


_registries = _Registries()


def second_reference(tensor: Tensor) -> Tensor:
    """A C++ reference to a tensor that is no view (as after ``detach()``), to be held while Horovod has the tensor.

    When a rank fails, Horovod's thread drops its references while it holds a lock. Horovod's functions wait for that
    lock, and hold the interpreter's meanwhile. If Python's reference is the only one left, dropping takes the
    interpreter's lock, too: the rank would hang instead of raising an error.
    """
    return tensor.view(-1)


@functools.cache
def gpu_operations() -> bool:
    """Whether Horovod was built with operations for GPUs."""
    import horovod.torch as hvd

    return bool(hvd.cuda_built() or hvd.rocm_built())


def averaging_device(device: torch.device) -> torch.device:
    """The device on which tensors are passed to Horovod: the CPU for GPU tensors, if it was built without GPU
    operations.

    Horovod would copy them to pinned memory itself, and average that without waiting for the copy."""
    return torch.device("cpu") if device.type == "cuda" and not gpu_operations() else device


def waited(hvd: Any, handle: int, timeout: float = math.inf) -> Any:
    """Waits as ``hvd.synchronize()`` does, but leaves the core to other ranks; without that, Gloo stood still on them
    for up to 30 s, its limit. Raises ``TimeoutError`` after ``timeout`` seconds."""
    wait_until(lambda: bool(hvd.poll(handle)), timeout, "Horovod")
    return hvd.synchronize(handle)


class _HorovodHandle:
    """``held``: second references to Horovod's tensors. ``device``: of the result."""

    def __init__(self, hvd: Any, number: int, held: list[Tensor], device: torch.device) -> None:
        self._hvd, self._number, self._held, self._device = hvd, number, held, device

    def done(self) -> bool:
        return bool(self._hvd.poll(self._number))

    def result(self, timeout: float = math.inf) -> Tensor:
        output = waited(self._hvd, self._number, timeout)
        # alltoall also returns the number of rows received from each rank; here they are all equal.
        result: Tensor = output[0] if isinstance(output, tuple) else output
        if result.is_cuda:
            stream = torch.cuda.current_stream(result.device)
            if os.environ.get("HOROVOD_ENABLE_ASYNC_COMPLETION"):
                # Horovod then makes the default stream wait for its work, whichever stream is current.
                stream.wait_stream(torch.cuda.default_stream(result.device))
            # Horovod allocated it on a stream of its own.
            result.record_stream(stream)
        return result.to(self._device)


class HorovodCollectives(PlainCollectives):
    """``horovod.torch`` on a process set. Raises what Horovod raises (``HorovodInternalError`` if a rank fails)."""

    ordered = False

    def __init__(self, process_set: Any = None) -> None:
        import horovod.torch as hvd
        from horovod.torch import mpi_ops

        self._set = hvd.global_process_set if process_set is None else process_set
        self._hvd, self._mpi_ops = hvd, mpi_ops

    @property
    def rank(self) -> int:
        """0 in a process outside the process set, where the optimizer does not exchange."""
        return 0 if self._set.included() is False else int(self._set.rank())

    @property
    def size(self) -> int:
        return 1 if self._set.included() is False else int(self._set.size())

    @property
    def active(self) -> bool:
        # Horovod's optimizer decides in the same way when it is built. A removed process set has no number.
        included = self._set.process_set_id is not None and bool(self._set.included())
        return included and (self._hvd.size() > 1 or os.environ.get("HOROVOD_ELASTIC") == "1")

    def generation(self) -> object:
        # hvd.init() replaces this table; a handle of the old one may name another operation in the new one.
        return self._mpi_ops._handle_map

    def registry(self) -> Registry:
        return _registries.of(self._set, self.generation())

    def sums(self, tensor: Tensor) -> bool:
        """False for int64 on a GPU: Horovod 0.28.1 multiplies what it fuses by 1.0, and bits beyond 53 are lost."""
        return tensor.dtype != torch.int64 or averaging_device(tensor.device).type != "cuda"

    def start(self, request: Request, name: str) -> Handle:
        hvd, mpi_ops = self._hvd, self._mpi_ops
        tensor = request.tensor.detach().to(averaging_device(request.tensor.device))
        held = [second_reference(tensor)]
        if request.verb == "broadcast":
            root = self._set.ranks[request.root]
            number = hvd.broadcast_async_(tensor, root, name=name, process_set=self._set)
            return _HorovodHandle(hvd, number, held, request.tensor.device)
        # Horovod's thread resizes outputs: a view taken once it has them may fail. So they are made here, as its public
        # functions make them.
        output = tensor.new_empty(tensor.shape if request.verb == "allreduce" else 0)
        held.append(second_reference(output))
        if request.verb == "allreduce":
            number = mpi_ops._allreduce_async(tensor, output, name, hvd.Sum, 1.0, 1.0, self._set)
        elif request.verb == "allgather":
            number = mpi_ops._allgather_async(tensor, output, name, self._set)
        else:
            splits, received = (torch.empty(n, dtype=torch.int32, device="cpu") for n in (0, self.size))
            held += map(second_reference, (splits, received))
            number = mpi_ops._alltoall_async(tensor, splits, output, received, name, self._set)
        return _HorovodHandle(hvd, number, held, request.tensor.device)

    def in_nodes(self, nodes: object) -> Nodes:
        """Finds process sets, or makes them; again after a new ``hvd.init()``. Raises ``ValueError`` if it
        cannot, or in an elastic job, where a new rank would wait for others here, they for it in ``state.sync()``."""
        if os.environ.get("HOROVOD_ELASTIC"):
            raise ValueError("nodes= works in no elastic job: build the compressor without it")
        inside, between = HorovodCollectives(self._set), HorovodCollectives(self._set)
        self._divide(nodes, inside, between)
        place = inside.rank, inside.size

        def renew() -> None:
            self._divide(nodes, inside, between)
            if place != (inside.rank, inside.size):
                raise RuntimeError(
                    "the number of ranks of a node, or this rank's place in it, has changed: build a new compressor"
                )

        return Nodes(self, between, inside, renew)

    def _divide(self, nodes: object, inside: "HorovodCollectives", between: "HorovodCollectives") -> None:
        """Finds the process sets of all nodes and places in them; gives this rank's to ``inside`` and ``between``."""
        hvd, everyone = self._hvd, list(self._set.ranks)
        if nodes is True:
            if not self._mpi_ops.is_homogeneous():
                raise ValueError("nodes must have equally many ranks, and Horovod's have not")
            own = torch.tensor([hvd.cross_rank()], dtype=torch.int64, device="cpu")
            found = HorovodCollectives().start(allgather(own), "hvd_compress.nodes").result().tolist()
            node_of = [found[rank] for rank in everyone]
        else:
            node_of = divided(nodes, len(everyone))
        rows = [[everyone[i] for i in row] for row in table(node_of)]
        for part, sets in ((inside, rows), (between, [list(column) for column in zip(*rows, strict=True)])):
            for process_set in map(self._process_set, sets):
                if process_set.included():
                    part._work_on(process_set)

    def _work_on(self, process_set: Any) -> None:
        self._set = process_set

    def _process_set(self, ranks: list[int]) -> Any:
        """The process set of these ranks, a new one if there is none. All ranks call it."""
        known = self._mpi_ops._basics._get_process_set_ids_and_ranks()
        for number, theirs in known.items():
            if list(theirs) == sorted(ranks):
                found = self._hvd.ProcessSet(ranks)
                found.process_set_id = number
                return found
        try:
            return self._hvd.add_process_set(ranks)
        except ValueError as error:
            if "DYNAMIC_PROCESS_SETS" not in str(error):
                raise
            raise ValueError(
                f"nodes= needs process sets, as of ranks {ranks}, from hvd.init(): docs/nodes.md"
            ) from None

    def check_optimizer(self, optimizer: object) -> None:
        """Raises ``ValueError`` unless Horovod's optimizer averages over the same ranks."""
        op, own = getattr(optimizer, "op", self._hvd.Average), getattr(optimizer, "process_set", self._set)
        if op != self._hvd.Average:
            raise ValueError("compression averages: DistributedOptimizer's op must be hvd.Average, its default")
        if own.process_set_id != self._set.process_set_id:
            raise ValueError(
                f"DistributedOptimizer works on process set {own.process_set_id} and its compressor on "
                f"{self._set.process_set_id}: give both the same process_set="
            )
