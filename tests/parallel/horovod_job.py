"""Horovod as host of :class:`job.Job`."""

import os
from contextlib import nullcontext
from typing import Any

import horovod.torch as hvd
import torch

from hvd_compress.carriers.horovod import HorovodCollectives, waited
from hvd_compress.cli.ranks import launched

name = "horovod"
#: By the number of ranks.
SETS = {2: [[0]], 3: [[0], [0, 1], [1, 2]], 4: [[0], [1], [2], [3], [0, 1], [2, 3], [0, 2], [1, 3], [1, 2, 3]]}


def start() -> None:
    """With the process sets of all cases: with ``"dynamic"`` ones, Horovod asks all ranks for new sets in each cycle,
    and calls that start a collective wait for the answers (scripts/lab/process_sets.py)."""
    hvd.init(process_sets=[hvd.ProcessSet(members) for members in SETS.get(launched(), [])])
    assert not os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS")


def process_set(members: list[int]) -> Any:
    """Of the sets that :func:`start` has made."""
    return HorovodCollectives()._process_set(members)


def stop() -> None:
    barrier()  # the last step of another node may still run
    hvd.shutdown()


rank, size = hvd.rank, hvd.size


def barrier() -> None:
    total(torch.zeros(1))


def gather(tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
    """The tensors of all ranks, (ranks, ...)."""
    handle = hvd.allgather_async(tensor[None], name="check.gather", **group_argument(group))
    return waited(hvd, handle)


def total(tensor: torch.Tensor) -> torch.Tensor:
    return waited(hvd, hvd.allreduce_async(tensor, op=hvd.Sum, name="check.total"))


def group_argument(group: Any) -> dict[str, Any]:
    return {} if group is None else {"process_set": group}


def wrap(job: Any, **arguments: Any) -> None:
    compression = hvd.Compression.none if job.compression is None else job.compression
    job.forward = job.model
    job.optimizer = hvd.DistributedOptimizer(
        job.plain_optimizer,
        named_parameters=job.model.named_parameters(),
        compression=compression,
        backward_passes_per_step=job.passes,
        **group_argument(job.group),
        **arguments,
    )
    if job.compression is None:
        return
    compress, parameters = compression.compress, list(job.model.parameters())

    def observed(grad: torch.Tensor) -> Any:
        if job.observe is not None:
            for p in parameters:
                if p.grad is grad:
                    job.observe(p, grad)
        return compress(grad)

    compression.compress = observed


def no_sync(job: Any) -> Any:
    return nullcontext()  # backward_passes_per_step counts the passes


def synchronize(job: Any) -> None:
    job.optimizer.synchronize()


def synchronized(job: Any) -> Any:
    return job.optimizer.skip_synchronize()
