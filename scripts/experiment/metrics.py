"""What a run measures: accuracy over the ranks, equality of the replicas, and where it ran."""

import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiment import data as datasets
from experiment.hosts import Horovod
from hvd_compress import ops


def autocast(kind: str, device: torch.device) -> AbstractContextManager[Any]:
    """bf16 autocast on the device, or nothing."""
    return torch.autocast(device.type, torch.bfloat16) if kind == "bf16" else nullcontext()


@torch.no_grad()
def average_norm_statistics(model: nn.Module, host: Horovod) -> None:
    """Running means and variances of the norms, averaged over ranks in one message: each rank has followed its own
    shard. Training does not read these buffers."""
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if buffers:
        flat = host.sum(torch.cat([buffer.flatten() for buffer in buffers])) / host.size
        for buffer, mean in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(mean.view_as(buffer))


@torch.no_grad()
def test_accuracy(model: nn.Module, data: datasets.Dataset, amp: str, host: Horovod, batch_size: int = 250) -> float:
    """Share of the test images classified correctly; each rank tests a part, the counts are summed."""
    average_norm_statistics(model, host)
    model.eval()
    device = data.test_labels.device
    correct = torch.zeros(1, dtype=torch.int64, device=device)
    with autocast(amp, device):
        for images, labels in datasets.test_batches(data, batch_size, host.rank, host.size):
            correct += (model(images).argmax(1) == labels).sum()
    model.train()
    return float(host.sum(correct)) / len(data.test_labels)


def mean_over_ranks(values: dict[str, float], host: Horovod) -> dict[str, float]:
    """Every value averaged over the ranks, in float64: byte counts exceed float32's integers."""
    total = host.sum(torch.tensor(list(values.values()), dtype=torch.float64))
    return dict(zip(values, (total / host.size).tolist(), strict=True))


def digest(tensor: Tensor) -> str:
    """A hash of the tensor's bits."""
    content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(content.numpy().tobytes()).hexdigest()


def replicas_equal(model: nn.Module, host: Horovod) -> bool:
    """Whether all parameters have the same bits on every rank."""
    mine = [digest(parameter) for parameter in model.parameters()]
    return all(theirs == mine for theirs in host.gather(mine))


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


# Of Horovod, Open MPI, Gloo and NCCL; without what launchers tell a rank about itself.
_SETTING = re.compile(
    r"OMPI_MCA_(?!PREFIXES|cpu_type|initial_wdir|num_procs)|NCCL_|GLOO_"
    r"|HOROVOD_(?!RANK|SIZE|HOSTNAME|LOCAL_|CROSS_|GLOO_RENDEZVOUS|GLOO_IFACE|SECRET)"
)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    if not shutil.which("git"):
        return None
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
