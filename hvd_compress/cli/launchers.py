"""The commands that start ranks of a module of this package: torchrun, mpirun, horovodrun."""

import os
import shutil
import sys
from pathlib import Path

#: Variables for ranks that share this machine: one thread each, and waiting ranks yield their core.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}


def program(name: str) -> str | None:
    """The path of a launcher: beside this Python, or on PATH."""
    return shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


def torchrun(ranks: int, *module: str) -> tuple[list[str], dict[str, str]]:
    """The command for ranks of ``python -m module...`` on this machine, for torch DDP, and its environment."""
    local = ["--master-addr", "127.0.0.1", "--local-addr", "127.0.0.1"]
    local += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(ranks), *local]
    return [*command, "-m", *module], {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"), **ENVIRONMENT}


def mpirun(ranks: int, *module: str) -> tuple[list[str], dict[str, str]]:
    """The same for Horovod, by Open MPI."""
    command = [program("mpirun") or "mpirun", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    command += ["--oversubscribe", "--bind-to", "none", "-np", str(ranks)]
    return [*command, sys.executable, "-m", *module], ENVIRONMENT


def horovodrun(ranks: int, *module: str) -> tuple[list[str], dict[str, str]]:
    """The same for Horovod, by Gloo."""
    command = [program("horovodrun") or "horovodrun", "-np", str(ranks), "--gloo", "--network-interfaces", "lo"]
    return [*command, sys.executable, "-m", *module], ENVIRONMENT
