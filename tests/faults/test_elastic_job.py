"""Horovod's elastic mode with Gloo: a worker is killed, another one joins, training goes on with equal replicas."""

import os
import re
import signal
import sys
import threading
from pathlib import Path

import pytest
from launch import end, start

pytest.importorskip("horovod.torch", reason="Horovod is not installed")

STEPS = 120


@pytest.mark.slow
def test_training_goes_on_after_a_worker_was_killed_and_another_one_joined(tmp_path):
    # Two names of this machine: Horovod gives no second chance to a host that has lost a worker.
    hosts, discover = tmp_path / "hosts", tmp_path / "discover.sh"
    hosts.write_text("localhost:1\n127.0.0.1:1\n")
    discover.write_text(f"#!/bin/sh\ncat {hosts}\n")
    discover.chmod(0o755)
    command = [str(Path(sys.executable).with_name("horovodrun")), "-np", "2", "--min-np", "1", "--max-np", "2"]
    command += ["--gloo", "--network-interfaces", "lo", "--host-discovery-script", str(discover)]
    job = str(Path(__file__).with_name("elastic_job.py"))
    process = start([*command, sys.executable, job, str(STEPS)], OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
    limit = threading.Timer(180.0, end, [process])
    limit.start()
    lines, killed = [], None
    try:
        for line in process.stdout:
            lines.append(line)
            found = re.search(r"\[127\.0\.0\.1\] process (\d+) step (\d+) of 2 ranks", line)
            if killed is None and found and int(found[2]) == STEPS // 3:
                hosts.write_text("localhost:2\n")
                killed = int(found[1])
                os.kill(killed, signal.SIGKILL)
        status = process.wait(timeout=30)
    finally:
        limit.cancel()
        end(process)
    text = "".join(lines)
    assert status == 0, text[-3000:]
    assert text.count(f"ends after {STEPS} steps with 2 ranks") == 2, text[-3000:]
    workers = set(re.findall(r"process (\d+) step", text))
    assert len(workers) == 3 and str(killed) in workers
