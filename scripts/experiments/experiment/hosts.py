"""What averages the gradients, behind the same few calls: Horovod's optimizer, torch's DistributedDataParallel, or
threads of one process.

No host imports another's library.
"""

import argparse
import math
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from experiment import compressors
from hvd_compress.engine.collectives import Collectives, allreduce
from hvd_compress.hosts.horovod import HorovodHost
from hvd_compress.hosts.threads import ThreadWorld


class Horovod:
    """The unmodified ``hvd.DistributedOptimizer``."""

    #: For a compressor that is not to find the host's own.
    collectives: Collectives | None = None

    def __init__(self) -> None:
        import horovod.torch as hvd

        self._hvd = hvd
        hvd.init()
        self.rank, self.size, self.local_rank = hvd.rank(), hvd.size(), hvd.local_rank()

    def broadcast(self, model: nn.Module) -> None:
        """Rank 0's weights to all ranks."""
        self._hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def compression(self, args: argparse.Namespace, method: str, model: nn.Module, optimizer: Optimizer) -> Any:
        """The object that compresses and has ``stats()``."""
        if compressors.METHODS[method].kind:
            return compressors.METHODS[method].build(args, model, optimizer, collectives=self.collectives)
        return self.stock(method, model, optimizer)

    def stock(self, method: str, model: nn.Module, optimizer: Optimizer) -> Any:
        """What the host's library brings along for none, fp16 and ddp-powersgd."""
        return compressors.Counted(getattr(self._hvd.Compression, method), self.size)

    def wrap(self, model: nn.Module, optimizer: Optimizer, compression: Any) -> tuple[nn.Module, Optimizer]:
        """The module to call and the optimizer to step."""
        named = model.named_parameters()
        return model, self._hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression)

    def synchronize(self, optimizer: Any) -> None:
        """The averaged gradients are in ``p.grad`` afterwards."""
        optimizer.synchronize()

    def update(self, optimizer: Any) -> None:
        """The optimizer's step, after :meth:`synchronize`."""
        with optimizer.skip_synchronize():
            optimizer.step()

    def replicas(self, model: nn.Module) -> list[Tensor]:
        """Ends the training: what must then be the same on all ranks."""
        return list(model.parameters())

    def sum(self, tensor: Tensor) -> Tensor:
        handle = self._hvd.allreduce_async(tensor, name=f"sum.{tensor.dtype}.{tensor.numel()}", op=self._hvd.Sum)
        # Horovod's own wait spins: it would take a core from ranks that are still computing.
        while not self._hvd.poll(handle):
            time.sleep(100e-6)
        total: Tensor = self._hvd.synchronize(handle)
        return total

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        return list(self._hvd.allgather_object(value, name="gather"))

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; also a barrier."""
        return bool(self.sum(torch.tensor([int(flag)])) > 0)

    def close(self, status: int) -> int:
        """Leaves the job; returns the process's exit status."""
        self._hvd.shutdown()
        return status


class Ddp(Horovod):
    """``DistributedDataParallel`` with a communication hook, for ranks started by torchrun or with its variables."""

    def __init__(self, device: str = "cpu") -> None:
        import torch.distributed as dist

        self._dist = dist
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if device == "cuda":
            torch.cuda.set_device(self.local_rank)
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        self.device, self.rank, self.size = torch.device(device), dist.get_rank(), dist.get_world_size()

    def broadcast(self, model: nn.Module) -> None:
        for tensor in model.state_dict().values():
            self._dist.broadcast(tensor, 0)

    def stock(self, method: str, model: nn.Module, optimizer: Optimizer) -> Any:
        return compressors.CountedHook(method, model, optimizer, self.size)

    def wrap(self, model: nn.Module, optimizer: Optimizer, compression: Any) -> tuple[nn.Module, Optimizer]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the option's new name does not exist in torch 2.11
            # Ranks keep their own norm statistics until a test, as with Horovod. powerSGD_hook starts collectives from
            # callbacks, in an order that with Gloo differs between ranks if there are several buckets.
            one_bucket = {"bucket_cap_mb": 1 << 20} if getattr(compression, "state", None) else {}
            module = nn.parallel.DistributedDataParallel(
                model, broadcast_buffers=False, gradient_as_bucket_view=True, **one_bucket
            )
        if not isinstance(compression, compressors.CountedHook):
            import hvd_compress

            module.register_comm_hook(compression, hvd_compress.ddp_hook)
        elif compression.hook:
            module.register_comm_hook(compression.state, compression.hook)
        return module, optimizer

    def synchronize(self, optimizer: Any) -> None:
        """The backward pass has done it."""

    def update(self, optimizer: Any) -> None:
        optimizer.step()

    def sum(self, tensor: Tensor) -> Tensor:
        total = tensor.to(self.device, copy=True)
        self._dist.all_reduce(total)
        return total.to(tensor.device)

    def gather(self, value: Any) -> list[Any]:
        everyone = [None] * self.size
        self._dist.all_gather_object(everyone, value)
        return everyone

    def close(self, status: int) -> int:
        self._dist.destroy_process_group()
        # Gloo's threads in torch may outlive the group, and then abort the interpreter's shutdown: skip the shutdown.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class Threads(Horovod):
    """One of several ranks in this process, which compute in turn. It passes gradients to a compressor as Horovod does;
    what no compressor sends is summed in one message of each dtype.

    Args:
        world: all ranks; ordered.
        board: a list of as many items as ranks, for :meth:`gather`.
    """

    def __init__(self, world: ThreadWorld, rank: int, board: list[Any]) -> None:
        self.collectives, self._board = world.collectives(rank), board
        self.rank, self.size, self.local_rank = rank, world.size, 0

    def broadcast(self, model: nn.Module) -> None:
        model.load_state_dict(self.gather(model.state_dict())[0])
        self.any(False)  # rank 0 waits: its state is not a copy

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

    def sum(self, tensor: Tensor) -> Tensor:
        return self.collectives.start(allreduce(tensor), "sum").result()

    def gather(self, value: Any) -> list[Any]:
        self._board[self.rank] = value
        self.any(False)
        values = list(self._board)
        self.any(False)
        return values

    def close(self, status: int) -> int:
        return status


HOSTS = ("horovod", "ddp", "threads")


def run(name: str, body: Callable[[Horovod], int], device: str = "cpu", ranks: int = 1) -> int:
    """Calls ``body`` with the host of this process's rank, or of ``ranks`` ranks in turn; returns its status."""
    if name != "threads":
        return body(start(name, device))
    world, board = ThreadWorld(ranks, timeout=math.inf, ordered=True, in_turn=True), [None] * ranks
    return max(world.run(lambda rank: body(Threads(world, rank, board))))


def start(name: str, device: str = "cpu") -> Horovod:
    return Ddp(device) if name == "ddp" else Horovod()
