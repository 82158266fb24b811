"""Hooks of gradients on torchft, as processes: peers die, fail and join."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import pytest

pytest.importorskip("torchft", reason="torchft is not installed")
coordination = pytest.importorskip("torchft.coordination")

HERE = Path(__file__).parent


class Job:
    """A lighthouse and peers, see tests/peers/hooks_job.py. A context that ends them all."""

    def __init__(self, **settings):
        self._temporary = tempfile.TemporaryDirectory(prefix="hvd-compress.")
        self.folder, self.settings, self.pids = Path(self._temporary.name), settings, {}

    def __enter__(self):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE.parents[1]}:{HERE.parent}"}
        self._parent = subprocess.Popen(
            [sys.executable, str(HERE / "hooks_job.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._lighthouse = coordination.LighthouseServer(
            bind="[::]:0", min_replicas=2, join_timeout_ms=2000, heartbeat_timeout_ms=1000
        )
        assert self._parent.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *error):
        for pid in filter(self.alive, self.pids.values()):
            os.kill(pid, signal.SIGKILL)
        self._parent.kill()
        self._parent.wait()
        self._lighthouse.shutdown()
        self._temporary.cleanup()

    def add(self, name, fault="none"):
        settings = {"folder": str(self.folder), "lighthouse": self._lighthouse.address(), "steps": 10**6}
        line = {**settings, **self.settings, "name": name, "fault": fault}
        print(json.dumps(line), file=self._parent.stdin, flush=True)
        self.pids[name] = int(self._parent.stdout.readline())

    @staticmethod
    def alive(pid):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True

    def events(self, name, event="step"):
        path = self.folder / f"{name}.0.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [found for line in lines if (found := json.loads(line))["event"] == event]

    def wait(self, condition, what, timeout=90):
        end = time.time() + timeout
        while not condition():
            if time.time() > end:
                errors = {path.name: path.read_text()[-2000:] for path in self.folder.glob("*.err")}
                raise TimeoutError(f"no {what} within {timeout} s: {errors}")
            time.sleep(0.05)

    def check_equal(self, least):
        """All peers had the same weights after each step that several have committed, which are at least so many."""
        hashes = defaultdict(list)
        for name in self.pids:
            for event in self.events(name):
                hashes[event["step"]].append(event["hash"])
        several = [found for found in hashes.values() if len(found) > 1]
        assert len(several) >= least and all(len({*found}) == 1 for found in several)


@pytest.mark.parametrize(
    ("host", "method", "point"), [("ddp", "iwp-lanes4", "exchange"), ("fsdp", "demo", "vote")], ids=str
)
def test_a_peer_dies_and_another_one_takes_its_place(host, method, point):
    with Job(host=host, method=method) as job:
        for name in ("one", "two"):
            job.add(name)
        job.add("dies", fault=f"{point}@4")
        job.wait(lambda: job.events("dies") and not job.alive(job.pids["dies"]), "end of a peer")
        job.wait(lambda: job.events("one")[-1]["peers"] == 2.0, "step of two peers")
        assert len(job.events("one", "taken back")) >= 1
        job.add("new")
        job.wait(lambda: len(job.events("new")) > 3, "steps of the new peer")
        assert job.events("new")[-1]["peers"] == 3.0
        job.check_equal(least=8)


def test_a_backward_pass_that_fails_on_one_peer_lets_the_others_repeat_the_step():
    with Job(host="fsdp", method="topk") as job:  # after such a failure DDP itself cannot go on
        job.add("one")
        job.add("two", fault="fails@3")
        job.wait(lambda: all(len(job.events(name)) > 8 for name in ("one", "two")), "steps after the failure")
        assert len(job.events("one", "taken back")) >= 1 and not job.events("two", "taken back")
        job.check_equal(least=8)
