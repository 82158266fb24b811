"""Starts processes for a test, and ends them, and only them, if they take too long."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PARALLEL = ROOT / "tests" / "parallel"
FORKED = str(ROOT / "tests" / "forked.py")

LAUNCHES = {"mpi-2": ["2"], "gloo-2": ["--gloo", "2"], "ddp-2": ["--ddp", "2"]}
#: Two ranks of each host, as arguments of scripts/run.sh.
on_every_launch = pytest.mark.parametrize("ranks", LAUNCHES.values(), ids=LAUNCHES.keys())


def on_launches(*names: str) -> pytest.MarkDecorator:
    """Two ranks of each host, of which these are in the short run."""
    launches = [pytest.param(ranks, id=n, marks=[pytest.mark.slow] * (n not in names)) for n, ranks in LAUNCHES.items()]
    return pytest.mark.parametrize("ranks", launches)


needs_hosts = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"),
    reason="network namespaces need root and iproute2",
)


def start(command: list[str], **environment: str) -> subprocess.Popen[str]:
    """Starts a command in its own process group, stderr joined to stdout. Call :func:`finish` or :func:`end`."""
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout: float) -> str:
    """Returns what it printed. After ``timeout`` seconds, or if the test is interrupted, ends it; then fails with its
    last lines."""
    try:
        return process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        pytest.fail(f"{process.args} ran past {timeout} s; its last lines:\n{end(process)[-6000:]}")
    finally:
        end(process)


def end(process: subprocess.Popen[str], grace: float = 30.0) -> str:
    """Ends it if it still runs: by SIGTERM, on which mpirun and the scripts end their ranks, which are in other process
    groups, then by SIGKILL. Returns what it printed meanwhile."""
    output = b""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            break
        os.killpg(process.pid, number)
        try:
            return process.communicate(timeout=grace)[0]
        except subprocess.TimeoutExpired as late:  # a rank may still hold the other end of the pipe
            output = late.output or b""
    return output.decode(errors="replace")


def launch(script: str, arguments: list[str], timeout: float, **environment: str) -> str:
    """Runs ``scripts/<script>``, see :func:`run`."""
    return run(["bash", str(ROOT / "scripts" / script), *arguments], timeout, **environment)


def fork(ranks: str, modules: str, script: str, arguments: list[str], timeout: float, **environment: str) -> str:
    """Runs a script on ranks of torch.distributed that tests/forked.py starts, see :func:`run`: imports take most of a
    short launch. test_lost_ranks.py and test_examples.py start ranks by torchrun."""
    return run([sys.executable, FORKED, ranks, modules, script, *arguments], timeout, **environment)


def run(command: list[str], timeout: float, **environment: str) -> str:
    """Returns what the ranks printed. Fails with each rank's last lines if a rank fails or it takes more than
    ``timeout`` seconds."""
    stalled = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "10", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "40"}
    with tempfile.TemporaryDirectory() as logs:
        environment = {**stalled, "HVD_COMPRESS_TEST_LOGS": logs, **environment}
        process = start(command, **environment)
        try:
            output = process.communicate(timeout=timeout)[0]
            problem = f"ended with {process.returncode}" if process.returncode else None
        except subprocess.TimeoutExpired:
            output, problem = end(process), f"took more than {timeout} s"
        finally:
            end(process)
        if problem:
            # What Horovod waited for, and which rank has not come; horovodrun begins each line with the rank.
            late = "".join(re.findall(r"^(?:.*>:)?\d+!?: \[.*\n", output, re.MULTILINE)[-5:])
            pytest.fail(f"{' '.join(command)[:300]} {problem}\n{late}{last_lines(Path(logs))}\n{output[-2500:]}")
    return output


def last_lines(logs: Path) -> str:
    """The unfinished case and the last lines of each rank."""
    parts = []
    for file in sorted(logs.glob("rank-*.log")):
        text = file.read_text()
        begun, done = (re.findall(rf"^{word} (\S+ \S+)", text, re.MULTILINE) for word in ("begin", "ok"))
        unfinished = next((case for case in reversed(begun) if case not in done), "none")
        parts.append(f"--- {file.stem}: unfinished case: {unfinished}\n" + "\n".join(text.splitlines()[-30:]))
    return "\n".join(parts)


def host_of(ranks: list[str]) -> list[str]:
    """The arguments that tell a script the host of its ranks. Skips the test if that is Horovod and is not installed.

    Args:
        ranks: the arguments of scripts/run.sh up to the number of ranks.
    """
    if "--ddp" in ranks:
        return ["--host", "ddp"]
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    return []


def run_cases(
    ranks: list[str],
    plan: dict[str, list[str]],
    timeout: float,
    steps: int = 40,
    host: str | None = None,
    nodes: int = 0,
    **environment: str,
) -> None:
    """Runs cases by method on real ranks, in one launch, and checks that every rank finished every one of them.

    Args:
        ranks: as in :func:`host_of`.
        plan: case names by method.
        timeout: of the whole launch, seconds.
        steps: of a case.
        host: of the ranks, if it is neither Horovod nor DDP.
        nodes: into how many the ranks are divided; 0 for none.
    """
    assert plan and all(plan.values())
    items = [f"{method}:{','.join(cases)}" for method, cases in plan.items()]
    chosen = ["--host", host] if host else host_of(ranks)
    script, arguments = str(PARALLEL / "check_training.py"), [*chosen, "--steps", str(steps), "--nodes", str(nodes)]
    if "--ddp" in ranks:
        output = fork(
            ranks[-1], "torch._dynamo,hvd_compress,pytest", script, [*arguments, *items], timeout, **environment
        )
    else:
        output = launch("run.sh", [*ranks, script, *arguments, *items], timeout, **environment)
    done = set(re.findall(r"\[rank (\d+)\] ok (\S+) (\S+) ", output))
    for rank in range(int(ranks[-1])):
        missing = [(m, c) for m, cases in plan.items() for c in cases if (str(rank), m, c) not in done]
        assert not missing, f"rank {rank} did not finish {missing}:\n{output[-3000:]}"
