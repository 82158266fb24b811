"""A rank of Horovod or torch.distributed that ``doctor``, ``bench`` or an experiment has launched."""

import os
import pickle
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..carriers.horovod import waited
from ..carriers.nodes import divided, table
from ..hosts.ddp import ddp_hook
from ..local.steps import LocalSteps

HOSTS = ("ddp", "horovod")


class Horovod:
    """The unmodified ``hvd.DistributedOptimizer``. ``nodes``: ``nodes=`` of the compressors, or 0."""

    def __init__(self, nodes: int = 0) -> None:
        import horovod.torch as hvd

        rows = table(divided(nodes, launched())) if nodes else []
        sets = [hvd.ProcessSet(ranks) for ranks in (*rows, *zip(*rows, strict=True)) if len(ranks) < launched()]
        hvd.init(process_sets=sets)
        self._hvd = hvd
        self.rank, self.size, self.local_rank = int(hvd.rank()), int(hvd.size()), int(hvd.local_rank())

    def wrap(self, model: nn.Module, optimizer: Any, compression: Any) -> tuple[nn.Module, Any]:
        """The module to call and the optimizer to step. ``compression``: None, ``"fp16"`` for the host's own, a
        compressor; for Horovod, an object with ``compress`` and ``decompress``; for DDP, a state and its hook."""
        stock = self._hvd.Compression.fp16 if compression == "fp16" else self._hvd.Compression.none
        given = compression if compression not in ("fp16", None) else stock
        return model, self._hvd.DistributedOptimizer(optimizer, model.named_parameters(), given)

    def synchronize(self, optimizer: Any) -> None:
        """Completes the averages in ``p.grad``."""
        optimizer.synchronize()

    def update(self, optimizer: Any) -> None:
        """The optimizer's step, after :meth:`synchronize`."""
        with optimizer.skip_synchronize():
            optimizer.step()

    def replicas(self, model: nn.Module) -> list[Tensor]:
        """Ends the training. Returns tensors that must be the same on all ranks."""
        return list(model.parameters())

    def sum(self, tensor: Tensor) -> Tensor:
        name = f"sum.{tensor.dtype}.{tensor.numel()}"
        return cast(Tensor, waited(self._hvd, self._hvd.allreduce_async(tensor, name=name, op=self._hvd.Sum)))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order. By tensors: Horovod's ``allgather_object()`` keeps a core busy, torch's
        ``all_gather_object()`` needs NumPy, which torch does not require."""
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [int(n) for n in self._allgather(torch.tensor([mine.numel()], dtype=torch.int64, device="cpu"))]
        parts = self._allgather(nn.functional.pad(mine, (0, max(sizes) - mine.numel())))
        return [pickle.loads(bytes(part[:n].tolist())) for part, n in zip(parts, sizes, strict=True)]

    def _allgather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, of one shape, in rank order."""
        return list(waited(self._hvd, self._hvd.allgather_async(tensor[None], name=f"gather.{tensor.dtype}")))

    def close(self, status: int = 0) -> None:
        """Leaves the job and ends the process."""
        self._hvd.shutdown()
        sys.exit(status)


class Ddp(Horovod):
    """``DistributedDataParallel``, over Gloo, or on ``"cuda"``, with a GPU for each rank, over NCCL."""

    def __init__(self, device: str = "cpu") -> None:
        from torch import distributed

        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if device == "cuda":
            torch.cuda.set_device(self.local_rank)
        distributed.init_process_group("nccl" if device == "cuda" else "gloo")
        self._dist, self._device = distributed, device
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()

    def wrap(self, model: nn.Module, optimizer: Any, compression: Any, **options: Any) -> tuple[nn.Module, Any]:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the option's new name does not exist in torch 2.11
            module = nn.parallel.DistributedDataParallel(
                model, broadcast_buffers=False, gradient_as_bucket_view=True, **options
            )
        if compression == "fp16":
            compression = None, fp16_compress_hook
        if compression is not None:
            state, hook = compression if isinstance(compression, tuple) else (compression, ddp_hook)
            module.register_comm_hook(state, hook)
        return module, optimizer

    def synchronize(self, optimizer: Any) -> None:
        """Does nothing: the averages are complete after the backward pass."""

    def update(self, optimizer: Any) -> None:
        optimizer.step()

    def sum(self, tensor: Tensor) -> Tensor:
        total = tensor.to(self._device, copy=True)
        self._dist.all_reduce(total)
        return total.to(tensor.device)

    def _allgather(self, tensor: Tensor) -> list[Tensor]:
        own = tensor.to(self._device)
        parts = [torch.empty_like(own) for _ in range(self.size)]
        self._dist.all_gather(parts, own)
        return parts

    def round_trips(self) -> list[float]:
        """The median seconds of the smallest message to each higher rank and back. All ranks call it: in each turn,
        every one measures with another one."""
        found, byte = [0.0] * self.size, torch.zeros(1, dtype=torch.uint8, device="cpu")
        turns = range(1, 1 << (self.size - 1).bit_length())
        for peer in [self.rank ^ turn for turn in turns if self.rank ^ turn < self.size]:
            seconds = []
            # Posted before: Gloo sends at once what is awaited.
            for tag, work in enumerate([self._dist.irecv(byte.clone(), peer, tag=tag) for tag in range(6)]):
                begin = time.perf_counter()
                for sends in (self.rank < peer, self.rank > peer):
                    self._dist.send(byte, peer, tag=tag) if sends else cast(Any, work).wait()
                seconds.append(time.perf_counter() - begin)
            found[peer] = statistics.median(seconds[1:])
        return found

    def close(self, status: int = 0) -> None:
        self._dist.destroy_process_group()
        # Gloo's threads may outlive the group and then abort the interpreter's shutdown: skip the shutdown.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class LocalRank:
    """Local steps in place of a host's averages. ``build``: makes the :class:`hvd_compress.LocalSteps` from the model,
    the optimizer and the compressor."""

    def __init__(self, build: Callable[[nn.Module, Any, Any], LocalSteps]) -> None:
        self._build = build

    def wrap(self, model: nn.Module, optimizer: Any, compression: Any) -> tuple[nn.Module, Any]:
        self._local = self._build(model, optimizer, compression)
        return model, optimizer

    def synchronize(self, optimizer: Any) -> None:
        """Does nothing: gradients are not averaged."""

    def update(self, optimizer: Any) -> None:
        optimizer.step()
        self._local.step()

    def replicas(self, model: nn.Module) -> list[Tensor]:
        """Ends the training. Returns the common weights, and the model's after the average of all weights."""
        common = list(self._local.state_dict()["local_steps"]["common"].values())
        self._local.finish(model)
        return [*common, *model.parameters()]


def launched() -> int:
    """The number of ranks that horovodrun or mpirun has started. Raises ``RuntimeError`` if it is not known."""
    for name in ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if name in os.environ:
            return int(os.environ[name])
    raise RuntimeError("the launcher does not say how many ranks there are: use horovodrun or mpirun")


def start(host: str, device: str = "cpu", nodes: int = 0) -> Horovod:
    """This process's rank. ``host``: of HOSTS. ``device``: of :class:`Ddp`. ``nodes``: of :class:`Horovod`."""
    return Ddp(device) if host == "ddp" else Horovod(nodes)
