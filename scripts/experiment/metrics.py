"""What a run measures: accuracy over the ranks, equality of the replicas, and where it all ran."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

from experiment import data as datasets
from hvd_compress import ops


def autocast(kind: str, device: torch.device) -> AbstractContextManager[Any]:
    """bf16 autocast on the device, or nothing."""
    return torch.autocast(device.type, torch.bfloat16) if kind == "bf16" else nullcontext()


def average_norm_statistics(model: nn.Module) -> None:
    """Running means and variances of the norms, averaged over ranks in one message.

    Each rank has followed its own shard. The average uses all of them, where rank 0's alone would be
    noisier, and makes every rank evaluate the same function. Training does not read these buffers.
    """
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if not buffers:
        return
    flat = hvd.allreduce(torch.cat([buffer.flatten() for buffer in buffers]), name="norm_statistics", op=hvd.Average)
    for buffer, mean in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(mean.view_as(buffer))


@torch.no_grad()
def test_accuracy(model: nn.Module, data: datasets.Dataset, amp: str, batch_size: int = 250) -> float:
    """Share of the test images classified correctly; each rank takes a part, the counts are summed."""
    average_norm_statistics(model)
    model.eval()
    device = data.test_labels.device
    correct = torch.zeros((), dtype=torch.int64, device=device)
    with autocast(amp, device):
        for images, labels in datasets.test_batches(data, batch_size, hvd.rank(), hvd.size()):
            correct += (model(images).argmax(1) == labels).sum()
    model.train()
    total = hvd.allreduce(correct, name="correct", op=hvd.Sum)
    return float(total) / len(data.test_labels)


def mean_over_ranks(values: dict[str, float]) -> dict[str, float]:
    """Every value averaged over the ranks, in float64: byte counts exceed float32's integers."""
    flat = torch.tensor(list(values.values()), dtype=torch.float64)
    return dict(zip(values, hvd.allreduce(flat, name="means", op=hvd.Average).tolist(), strict=True))


def replicas_equal(model: nn.Module) -> bool:
    """Whether all parameters have the same bits on every rank."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        content = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(content.numpy().tobytes())
    return len(set(hvd.allgather_object(digest.hexdigest(), name="digest"))) == 1


def environment() -> dict[str, Any]:
    """Versions and machine, so that a result can be placed later."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "horovod": _version("horovod"),
        "hvd_compress": _version("hvd_compress"),
        "cpu_capability": ops.CPU_CAPABILITY,
        "git_commit": _git_commit(),
        "cpus": os.cpu_count(),
        "threads_per_rank": torch.get_num_threads(),
        "settings": {name: value for name, value in sorted(os.environ.items()) if _SETTING.match(name)},
    }


# Of Horovod and Open MPI; what launchers tell a rank of itself is none.
_SETTING = re.compile(
    r"OMPI_MCA_(?!PREFIXES|cpu_type|initial_wdir|num_procs)"
    r"|HOROVOD_(?!RANK|SIZE|HOSTNAME|LOCAL_|CROSS_|GLOO_RENDEZVOUS|GLOO_IFACE|SECRET)"
)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    try:
        folder = Path(__file__).parent
        command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
