"""A rank is killed, fails or is stopped: the job ends soon, or goes on as if nothing had happened. Nothing hangs."""

import os
import random
import re
import signal
import threading
import time
from pathlib import Path

import pytest
from launch import ROOT, end, host_of, on_every_launch, on_launches, start
from methods import TRAINED

VICTIM = Path(__file__).with_name("victim.py")
#: Seconds within which a job must end. The launchers need most of it: mpirun and horovodrun end ranks one by one.
SOON = 40.0


class Training:
    """A job of victim.py."""

    def __init__(self, ranks, *options, **environment):
        self.printed, self.pids = [], {}
        command = ["bash", str(ROOT / "scripts" / "run.sh"), *ranks, str(VICTIM), *host_of(ranks), *options]
        self.process = start(command, **environment)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        end(self.process)
        for pid in self.pids.values():  # none is left, unless the test fails
            if self.alive(pid):
                os.kill(pid, signal.SIGKILL)

    def until(self, pattern, timeout=180.0):
        """Reads what the job prints, up to a line that contains ``pattern``."""
        limit = threading.Timer(timeout, end, [self.process])  # which ends the reading
        limit.start()
        try:
            for line in self.process.stdout:
                self.printed.append(line)
                if found := re.search(r"\[rank (\d+)\] process (\d+)", line):
                    self.pids[int(found[1])] = int(found[2])
                if re.search(pattern, line):
                    return
        finally:
            limit.cancel()
        pytest.fail(f"no {pattern!r} within {timeout} s:\n{self.text()}")

    def ends(self, timeout):
        """Seconds until the job has ended. Fails after ``timeout`` seconds, or if a rank is left."""
        begin = time.monotonic()
        self.printed.append(self.process.communicate(timeout=timeout)[0])
        seconds = time.monotonic() - begin
        while any(map(self.alive, self.pids.values())):
            assert time.monotonic() - begin < timeout, f"ranks are left:\n{self.text()}"
            time.sleep(0.1)
        return seconds

    @staticmethod
    def alive(pid):
        try:
            return "victim" in Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            return False

    def text(self):
        return "".join(self.printed)[-3000:]


def kill_a_rank(ranks, method, seed):
    """At a random moment of a random step."""
    choose = random.Random(seed)
    with Training(ranks, "--method", method) as training:
        training.until(rf"\[rank 1\] .* step {choose.randrange(2, 30)}$")
        training.until(r"\[rank 0\] .* step")
        time.sleep(choose.random() * 0.05)
        os.kill(training.pids[choose.randrange(2)], signal.SIGKILL)
        seconds = training.ends(SOON)
        assert training.process.returncode != 0
    print(f"{ranks} {method}: ended {seconds:.1f} s after a rank was killed")


@on_launches("mpi-2", "ddp-2")
def test_a_job_ends_when_a_rank_is_killed(ranks):
    kill_a_rank(ranks, "iwp", seed=len(ranks))


@pytest.mark.slow
@on_every_launch
@pytest.mark.parametrize("method", [name for name in TRAINED if name != "iwp"])
def test_a_job_of_any_method_ends_when_a_rank_is_killed(ranks, method):
    for seed in range(2):
        kill_a_rank(ranks, method, seed)


@on_launches("gloo-2")
def test_training_goes_on_after_a_rank_was_stopped_for_a_while_and_ends_when_backward_fails_on_one(ranks):
    with Training(ranks, "--fail-at", "60") as training:
        training.until(r"\[rank 1\] .* step 9$")
        os.kill(training.pids[1], signal.SIGSTOP)
        time.sleep(2.0)
        os.kill(training.pids[1], signal.SIGCONT)
        training.until("ArithmeticError: seeded by the test")
        training.ends(SOON)
        assert training.process.returncode != 0
        assert "has equal replicas" in "".join(training.printed)


@pytest.mark.slow
def test_a_job_ends_when_a_rank_is_stopped_for_ever():
    """By Gloo's timeout, HOROVOD_GLOO_TIMEOUT_SECONDS. (MPI: never, since Horovod's coordinator itself waits in MPI for
    the stopped rank. DDP: by the process group's timeout.)"""
    stall = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "3", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "6"}
    with Training(["--gloo", "2"], HOROVOD_GLOO_TIMEOUT_SECONDS="30", **stall) as training:
        training.until(r"\[rank 1\] .* step 9$")
        os.kill(training.pids[1], signal.SIGSTOP)
        training.ends(SOON + 60)
        assert training.process.returncode != 0
