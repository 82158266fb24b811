"""Who averages the gradients of `scripts/exchange_rank.py`: Horovod with a compression, or torch's own DDP."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

#: Rank and ranks as the launchers say them: mpirun, and horovodrun or netlab_gloo.py.
_RANK = ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK")
_SIZE = ("OMPI_COMM_WORLD_SIZE", "HOROVOD_SIZE")

#: Its name among the methods.
DDP_FP16 = "ddp-fp16"


class Exchanger(Protocol):
    """The ranks of a job and what averages their gradients. ``compression`` is None where none can be asked."""

    rank: int
    size: int
    compression: Any

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        """From now on, backward and :meth:`synchronize` average gradients."""

    def backward(self) -> None: ...

    def synchronize(self) -> None:
        """The averaged gradients are in ``p.grad`` afterwards."""

    def update(self) -> None:
        """The optimizer's step, after :meth:`synchronize`."""

    def any(self, flag: bool) -> bool:
        """Whether any rank says so. All ranks arrive before one leaves."""

    def sum(self, tensor: Tensor) -> Tensor: ...

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""

    def close(self) -> None: ...


class HorovodExchanger:
    """The unmodified ``hvd.DistributedOptimizer`` with what ``build`` makes as its compression."""

    def __init__(self, build: Callable[[nn.Module, Optimizer, int], Any]) -> None:
        import horovod.torch as hvd

        self._hvd, self._build = hvd, build
        hvd.init()
        self.rank, self.size = hvd.rank(), hvd.size()
        self.compression: Any = None

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model = model
        self.compression = self._build(model, optimizer, self.size)
        self.optimizer = self._hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=self.compression
        )

    def backward(self) -> None:
        self._model().backward()

    def synchronize(self) -> None:
        self.optimizer.synchronize()

    def update(self) -> None:
        with self.optimizer.skip_synchronize():
            self.optimizer.step()

    def any(self, flag: bool) -> bool:
        handle = self._hvd.allreduce_async(torch.tensor([int(flag)]), name="bench.any", op=self._hvd.Sum)
        # Horovod's own wait yields in a loop, and takes a core from ranks that are still at work.
        while not self._hvd.poll(handle):
            time.sleep(100e-6)
        return bool(self._hvd.synchronize(handle) > 0)

    def sum(self, tensor: Tensor) -> Tensor:
        total: Tensor = self._hvd.allreduce(tensor, name="bench.sum", op=self._hvd.Sum)
        return total

    def gather(self, value: Any) -> list[Any]:
        return list(self._hvd.allgather_object(value, name="bench.gather"))

    def close(self) -> None:
        self._hvd.shutdown()


class DdpExchanger:
    """``DistributedDataParallel`` over Gloo with torch's ``fp16_compress_hook``: the rival outside. Horovod is not
    started, so that its background thread takes nothing from it."""

    def __init__(self, master: str, interface: str) -> None:
        import torch.distributed as dist

        self._dist = dist
        self.rank, self.size = _from_environment(_RANK), _from_environment(_SIZE)
        self.compression: Any = None
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        dist.init_process_group("gloo", init_method=f"tcp://{master}", rank=self.rank, world_size=self.size)

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
        from torch.nn.parallel import DistributedDataParallel

        self._model, self._optimizer = DistributedDataParallel(model), optimizer
        self._model.register_comm_hook(None, fp16_compress_hook)

    def backward(self) -> None:
        self._model().backward()

    def synchronize(self) -> None:
        """DDP's backward has waited already."""

    def update(self) -> None:
        self._optimizer.step()

    def any(self, flag: bool) -> bool:
        return bool(self.sum(torch.tensor([int(flag)])) > 0)

    def sum(self, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        self._dist.all_reduce(total)
        return total

    def gather(self, value: Any) -> list[Any]:
        everyone = [None] * self.size
        self._dist.all_gather_object(everyone, value)
        return everyone

    def close(self) -> None:
        self._dist.destroy_process_group()


def _from_environment(names: tuple[str, ...]) -> int:
    for name in names:
        if name in os.environ:
            return int(os.environ[name])
    raise RuntimeError(f"none of {', '.join(names)} is set: start this with run.sh or netlab.sh")


class Clock:
    """Seconds spent inside a compression object, which stays the very object that Horovod and its guard know: only its
    two methods are put through the clock."""

    def __init__(self, compression: Any) -> None:
        # hvd_compress' own methods wait for the network in decompress, Horovod's never do.
        self._driver = getattr(compression, "_driver", None)
        self._now: dict[str, float] = {}
        self.lap()
        compression.compress = self._clocked("compress", compression.compress)
        compression.decompress = self._clocked("decompress", compression.decompress)

    def lap(self) -> dict[str, float]:
        """What was spent since the last lap: ``compress`` and ``decompress`` without waiting, and ``wait``."""
        last, self._now = self._now, dict.fromkeys(("compress", "decompress", "wait"), 0.0)
        return last

    def _clocked(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def clocked(*args: Any) -> Any:
            # No processor time: a call of the kernel for each took half a millisecond on a busy machine.
            start, waited = time.perf_counter(), self._waited()
            try:
                return function(*args)
            finally:
                wait = self._waited() - waited
                self._now[name] += time.perf_counter() - start - wait
                self._now["wait"] += wait

        return clocked

    def _waited(self) -> float:
        return 0.0 if self._driver is None else float(self._driver.waited)
