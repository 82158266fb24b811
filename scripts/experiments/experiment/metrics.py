"""What a run measures beside its quality: means over the ranks, equality of the replicas, and where it ran."""

import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiment.hosts import Host
from hvd_compress import ops
from hvd_compress.engine.shards import local


def mean_over_ranks(values: dict[str, float], host: Host) -> dict[str, float]:
    """Every value averaged over the ranks, in float64: byte counts exceed float32's integers."""
    total = host.sum(torch.tensor(list(values.values()), dtype=torch.float64))
    return dict(zip(values, (total / host.size).tolist(), strict=True))


def digest(tensor: Tensor) -> str:
    """A hash of the tensor's bits; of a sharded tensor, of this rank's shard."""
    content = local(tensor).detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(content.numpy().tobytes()).hexdigest()


def replicas_equal(tensors: Iterable[Tensor], host: Host) -> bool:
    """Whether all tensors have the same bits on every rank; if they are sharded, on every rank that has this shard."""
    found = host.gather([digest(tensor) for tensor in tensors])
    return all(digests == found[rank % host.shards] for rank, digests in enumerate(found))


def environment() -> dict[str, Any]:
    """Versions and machine, so that a result can be placed later."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "horovod": _version("horovod"),
        "hvd_compress": _version("hvd_compress"),
        "cpu_capability": ops.CPU_CAPABILITY,
        "git_commit": git_commit(),
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


def git_commit() -> str | None:
    """The commit of the code, with ``-dirty`` behind it if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    if not shutil.which("git"):
        return None
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
