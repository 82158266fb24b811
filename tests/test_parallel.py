"""Real Horovod, real ranks: every case of parallel/check_training.py under mpirun and horovodrun."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAUNCHES = {"mpi-2": ["2"], "mpi-4": ["4"], "gloo-3": ["--gloo", "3"]}

pytest.importorskip("horovod.torch", reason="Horovod is not installed")


def launch(arguments: list[str], timeout: float) -> str:
    """Runs scripts/run.sh; past ``timeout`` seconds ends what it started, and fails with each rank's last lines."""
    environment = {
        **os.environ,
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "10",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "40",
    }
    process = subprocess.Popen(
        ["bash", str(ROOT / "scripts" / "run.sh"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{arguments} ran past {timeout} s; its last lines:\n{output[-6000:]}")
    if process.returncode != 0:
        pytest.fail(f"{arguments} ended with {process.returncode}:\n{output[-6000:]}")
    return output


@pytest.mark.parametrize("ranks", LAUNCHES.values(), ids=LAUNCHES.keys())
def test_training_on_real_horovod(ranks):
    sys.path.insert(0, str(ROOT / "tests" / "parallel"))
    from check_training import CASES

    output = launch([*ranks, str(ROOT / "tests" / "parallel" / "check_training.py")], timeout=240)
    for name in CASES:
        assert f"ok {name}" in output, f"{name} did not finish:\n{output[-3000:]}"
