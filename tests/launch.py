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


def launch(script: str, arguments: list[str], timeout: float, **environment: str) -> str:
    """Runs ``scripts/<script>``; past ``timeout`` seconds kills its process group, and fails with the ranks' last
    lines."""
    process = subprocess.Popen(
        ["bash", str(ROOT / "scripts" / script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env={
            **os.environ,
            "HOROVOD_STALL_CHECK_TIME_SECONDS": "10",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "40",
            **environment,
        },
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{script} {arguments} ran past {timeout} s; its last lines:\n{output[-6000:]}")
    if process.returncode != 0:
        pytest.fail(f"{script} {arguments} ended with {process.returncode}:\n{output[-6000:]}")
    return output
