"""What averages the gradients of a training: Horovod's optimizer, torch's DistributedDataParallel, FSDP2 with a
compressor between nodes, or threads of one process."""

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import hvd_compress
from experiment import compressors
from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.carriers.torch_collectives import TorchCollectives
from hvd_compress.cli import ranks
from hvd_compress.engine.collectives import Collectives, allreduce
from hvd_compress.hosts.fsdp import reduces_to_averages
from hvd_compress.hosts.horovod import HorovodHost


class Host:
    """What a training needs of a rank besides the calls of :mod:`hvd_compress.cli.ranks`."""

    #: For a compressor that is not to find the host's own.
    collectives: Collectives | None = None
    #: Consecutive ranks that have the parts of one model.
    shards = 1

    def shard(self, args: argparse.Namespace, model: nn.Module) -> None:
        """Divides the model among the ranks of a node, before its optimizer is built. ``ValueError`` for ``--nodes``
        that do not divide the ranks."""

    def whole(self, model: nn.Module) -> AbstractContextManager[None]:
        """In the block, the model has all its weights, and ranks may call it as often as each needs."""
        return nullcontext()

    def compression(self, args: argparse.Namespace, method: str, model: nn.Module, optimizer: Optimizer) -> Any:
        """The object that compresses and has ``stats()``."""
        if compressors.METHODS[method].kind:
            nodes = getattr(args, "nodes", None) or False
            return compressors.METHODS[method].build(args, model, optimizer, collectives=self.collectives, nodes=nodes)
        return self.stock(method, model, optimizer)


class Horovod(Host, ranks.Horovod):
    def stock(self, method: str, model: nn.Module, optimizer: Optimizer) -> Any:
        """What the host's library brings along for none, fp16 and ddp-powersgd."""
        return compressors.Counted(getattr(self._hvd.Compression, method), self.size)


class Ddp(Host, ranks.Ddp):
    def stock(self, method: str, model: nn.Module, optimizer: Optimizer) -> Any:
        return compressors.CountedHook(method, model, optimizer, self.size)

    def wrap(self, model: nn.Module, optimizer: Optimizer, compression: Any) -> tuple[nn.Module, Optimizer]:
        hook = getattr(compression, "hook", compression)
        # powerSGD_hook starts collectives from callbacks, in an order that with Gloo differs between ranks if there are
        # several buckets.
        one_bucket = {"bucket_cap_mb": 1 << 20} if isinstance(hook, tuple) else {}
        return super().wrap(model, optimizer, hook, **one_bucket)


class Fsdp(Ddp):
    """FSDP2 inside nodes, and between them a compressor, or, without one, FSDP's own all-reduce (HSDP)."""

    def shard(self, args: argparse.Namespace, model: nn.Module) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        if self.size % args.nodes:
            raise ValueError(f"--nodes must be a divisor of the ranks, {self.size}, got {args.nodes}")
        self.shards = self.size // args.nodes
        mesh = init_device_mesh(args.device, (args.nodes, self.shards), mesh_dim_names=("replicate", "shard"))
        self.collectives = TorchCollectives(mesh.get_group("replicate"))
        native = args.compression == "none" and not args.local_steps
        averages = reduces_to_averages(mesh["shard"])
        for module in (*getattr(model, "blocks", ()), model):
            sharded = fully_shard(module, mesh=mesh if native else mesh["shard"], reshard_after_forward=False)
            if not averages:
                sharded.set_force_sum_reduction_for_comms(True)

    def compression(self, args: argparse.Namespace, method: str, model: nn.Module, optimizer: Optimizer) -> Any:
        flat = argparse.Namespace(**{**vars(args), "nodes": None})  # its collectives are those between nodes
        return super().compression(flat, method, model, optimizer)

    def stock(self, method: str, model: nn.Module, optimizer: Optimizer) -> Any:
        return compressors.CountedHook(method, model, optimizer, self.collectives.size)

    def wrap(self, model: nn.Module, optimizer: Optimizer, compression: Any) -> tuple[nn.Module, Optimizer]:
        if not isinstance(compression, compressors.Counted):
            hvd_compress.register_fsdp_hooks(model, compression)
        return model, optimizer

    @contextmanager
    def whole(self, model: nn.Module) -> Iterator[None]:
        from torch.distributed.fsdp import FSDPModule

        modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in modules:
            module.unshard()
        try:
            yield
        finally:
            for module in modules:
                module.reshard()


class Threads(Host):
    """One of several ranks in this process, which compute in turn. It passes gradients to a compressor as Horovod does;
    what no compressor sends is summed in one message of each dtype.

    Args:
        world: all ranks; ordered.
        board: a list of as many items as ranks, for :meth:`gather`.
    """

    def __init__(self, world: ThreadWorld, rank: int, board: list[Any]) -> None:
        self.collectives, self._board = world.collectives(rank), board
        self.rank, self.size, self.local_rank = rank, world.size, 0

    def stock(self, method: str, model: nn.Module, optimizer: Optimizer) -> Any:
        return compressors.Counted(compressors.STOCK[method], self.size)

    def wrap(self, model: nn.Module, optimizer: Optimizer, compression: Any) -> tuple[nn.Module, Optimizer]:
        counted = isinstance(compression, compressors.Counted)
        self._protocol = compression
        if not counted:  # its own host is DDP's, whose collectives are ordered, too
            self._protocol = HorovodHost(compression.engine, None)
            compression.bind(self._protocol)
        self._pending: list[tuple[nn.Parameter, Tensor, Any]] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._compress)
        return model, optimizer

    def _compress(self, parameter: nn.Parameter) -> None:
        self._pending.append((parameter, *self._protocol.compress(parameter.grad)))

    def synchronize(self, optimizer: Any) -> None:
        payloads = [payload for _, payload, _ in self._pending]
        averages: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(payload.dtype for payload in payloads):
            numbers = [i for i, payload in enumerate(payloads) if payload.dtype == dtype]
            average = self.sum(torch.cat([payloads[i].flatten() for i in numbers])).div_(self.size)
            parts = average.split([payloads[i].numel() for i in numbers])
            averages |= {i: part.view_as(payloads[i]) for i, part in zip(numbers, parts, strict=True)}
        for number, (parameter, _, context) in enumerate(self._pending):
            parameter.grad = self._protocol.decompress(averages[number], context)
        self._pending = []

    def update(self, optimizer: Any) -> None:
        optimizer.step()

    def replicas(self, model: nn.Module) -> list[Tensor]:
        """Ends the training: what must then be the same on all ranks."""
        return list(model.parameters())

    def sum(self, tensor: Tensor) -> Tensor:
        return self.collectives.start(allreduce(tensor), "sum").result()

    def gather(self, value: Any) -> list[Any]:
        self._board[self.rank] = value
        self.sum(torch.zeros(1))  # all have written
        values = list(self._board)
        self.sum(torch.zeros(1))  # all have read
        return values

    def close(self, status: int) -> int:
        return status


HOSTS = (*ranks.HOSTS, "fsdp", "threads")


def run(name: str, body: Callable[[Any], int], device: str = "cpu", ranks: int = 1, nodes: int = 0) -> int:
    """Calls ``body`` with the host of this process's rank, or of ``ranks`` ranks in turn; returns its status.
    ``nodes``: ``nodes=`` of the compressors, or 0."""
    if name != "threads":
        return body(start(name, device, nodes))
    world, board = ThreadWorld(ranks, timeout=math.inf, ordered=True, in_turn=True), [None] * ranks
    return max(world.run(lambda rank: body(Threads(world, rank, board))))


def start(name: str, device: str = "cpu", nodes: int = 0) -> Any:
    if name == "horovod":
        return Horovod(nodes)
    return (Fsdp if name == "fsdp" else Ddp)(device=device)
