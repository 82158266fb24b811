"""What averages the gradients: Horovod's optimizer or torch's DistributedDataParallel, behind the same few calls.

Neither host imports the other's library.
"""

import argparse
import os
import sys
import time
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from experiment import compressors


class Horovod:
    """The unmodified ``hvd.DistributedOptimizer``."""

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
            return compressors.METHODS[method].build(args, model, optimizer)
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
        """DistributedDataParallel does it."""

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


HOSTS = ("horovod", "ddp")


def start(name: str, device: str = "cpu") -> Horovod:
    return Ddp(device) if name == "ddp" else Horovod()
