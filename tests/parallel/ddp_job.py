"""torch DistributedDataParallel as host of :class:`job.Job`."""

from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
from job import DEVICE
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import hvd_compress

name = "ddp"


def start() -> None:
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(seconds=120))


def stop() -> None:
    distributed.destroy_process_group()


rank, size, barrier = distributed.get_rank, distributed.get_world_size, distributed.barrier


def gather(tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
    """The tensors of all ranks, (ranks, ...)."""
    mine = tensor.to(DEVICE)
    out = [torch.empty_like(mine) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(out, mine, group=group)
    return torch.stack(out).to(tensor.device)


def total(tensor: torch.Tensor) -> torch.Tensor:
    total = tensor.to(DEVICE, copy=True)
    distributed.all_reduce(total)
    return total.to(tensor.device)


def group_argument(group: Any) -> dict[str, Any]:
    return {} if group is None else {"process_group": group}


def wrap(job: Any, **arguments: Any) -> None:
    # A bucket of DDP holds a few of the model's tensors.
    arguments = {"find_unused_parameters": job.unused, "bucket_cap_mb": 0.01, **arguments}
    job.ddp = DistributedDataParallel(job.model, **group_argument(job.group), **arguments)
    job.forward, job.optimizer = job.ddp, job.plain_optimizer
    if job.compression is None:
        return

    def hook(state, bucket):  # DDP checks annotations
        if job.observe is not None:
            for p, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
                job.observe(p, grad)
        return hvd_compress.ddp_hook(state, bucket)

    job.ddp.register_comm_hook(job.compression, hook)


def no_sync(job: Any) -> Any:
    return job.ddp.no_sync()


def synchronize(job: Any) -> None:
    """backward() has done it."""


def synchronized(job: Any) -> Any:
    return nullcontext()
