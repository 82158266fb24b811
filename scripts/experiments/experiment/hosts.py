"""What averages the gradients of a training: Horovod's optimizer, torch's DistributedDataParallel, or threads of one
process."""

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from experiment import compressors
from hvd_compress.cli import ranks
from hvd_compress.engine.collectives import Collectives, allreduce
from hvd_compress.hosts.horovod import HorovodHost
from hvd_compress.hosts.threads import ThreadWorld


class Host:
    """What a training needs of a rank besides the calls of :mod:`hvd_compress.cli.ranks`."""

    #: For a compressor that is not to find the host's own.
    collectives: Collectives | None = None

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
        self._protocol = compression if counted else HorovodHost(compression.engine)
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


HOSTS = (*ranks.HOSTS, "threads")


def run(name: str, body: Callable[[Any], int], device: str = "cpu", ranks: int = 1, nodes: bool = False) -> int:
    """Calls ``body`` with the host of this process's rank, or of ``ranks`` ranks in turn; returns its status.
    ``nodes``: whether compressors will get ``nodes``."""
    if name != "threads":
        return body(start(name, device, nodes))
    world, board = ThreadWorld(ranks, timeout=math.inf, ordered=True, in_turn=True), [None] * ranks
    return max(world.run(lambda rank: body(Threads(world, rank, board))))


def start(name: str, device: str = "cpu", nodes: bool = False) -> Any:
    return Ddp(device=device) if name == "ddp" else Horovod(nodes)
