"""Starts ranks for a test, and ends just what it started when they take too long."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PARALLEL = ROOT / "tests" / "parallel"

needs_hosts = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"),
    reason="network namespaces need root and iproute2",
)


def start(command: list[str], **environment: str) -> subprocess.Popen[str]:
    """In a process group of its own, errors among the output; :func:`finish` it, or :func:`end` it."""
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
    """What it printed. Past ``timeout`` seconds fails with its last lines; it is ended even if the test is broken
    off."""
    try:
        return process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        pytest.fail(f"{process.args} ran past {timeout} s; its last lines:\n{end(process)[-6000:]}")
    finally:
        end(process)


def end(process: subprocess.Popen[str], grace: float = 30.0) -> str:
    """Asks it to end, if it did not, since only so mpirun and the scripts take along their ranks, which lead groups of
    their own; then kills it. Returns what it printed meanwhile."""
    output = b""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            break
        os.killpg(process.pid, number)
        try:
            return process.communicate(timeout=grace)[0]
        except subprocess.TimeoutExpired as late:  # a rank that is left may hold the other end of the pipe
            output = late.output or b""
    return output.decode(errors="replace")


def launch(script: str, arguments: list[str], timeout: float, **environment: str) -> str:
    """Runs ``scripts/<script>``, and fails with the ranks' last lines if they fail or run past ``timeout`` seconds."""
    stalled = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "10", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "40"}
    process = start(["bash", str(ROOT / "scripts" / script), *arguments], **{**stalled, **environment})
    output = finish(process, timeout)
    if process.returncode != 0:
        pytest.fail(f"{script} {arguments} ended with {process.returncode}:\n{output[-6000:]}")
    return output
