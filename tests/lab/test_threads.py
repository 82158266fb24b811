"""scripts/lab/threads.py: run and wait seconds of threads."""

import os
import subprocess
import sys

import pytest
import threads
from threads import Sample, Thread

TWO_ON_ONE_CORE = """
import os, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
other = os.fork()
print(other or os.getpid(), flush=True)
while True: pass
"""


@pytest.fixture
def started():
    """A function that starts Python code and returns its process."""
    processes = []

    def start(code):
        processes.append(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_a_wait_that_has_not_ended_counts():
    thread = Thread(0.0, Sample(5.0, 7.0, 3, "R"))
    thread.add(1.0, Sample(5.5, 7.5, 4, "R"))
    thread.add(2.0, Sample(5.5, 7.5, 4, "R"))
    thread.add(4.0, Sample(5.5, 7.5, 4, "R"))
    assert (thread.run, thread.wait) == (0.5, 3.5)


def test_sleep_is_no_wait_and_a_wait_before_the_first_sample_does_not_count():
    thread = Thread(0.0, Sample(5.0, 7.0, 3, "S"))
    thread.add(2.0, Sample(5.0, 7.0, 3, "S"))
    assert (thread.run, thread.wait) == (0.0, 0.0)
    thread.add(3.0, Sample(5.5, 27.0, 4, "R"))
    assert (thread.run, thread.wait) == (0.5, 2.5)


def test_threads_that_compute_run_or_wait(started):
    busy, idle = started(TWO_ON_ONE_CORE), started("import time\nprint(flush=True)\ntime.sleep(100)")
    pids = [int(busy.stdout.readline()), int(busy.stdout.readline())]
    idle.stdout.readline()
    try:
        found = threads.measure([*pids, idle.pid], 0.8)
    finally:
        for pid in set(pids) - {busy.pid}:
            os.kill(pid, 9)
    runs = [found[pid, pid].run for pid in pids]
    assert 0 < sum(runs) < 1.2
    for pid in pids:
        assert 0.6 < found[pid, pid].run + found[pid, pid].wait < 1.2
        assert found[pid, pid].wait > 0.1
    assert found[idle.pid, idle.pid].run < 0.1 and found[idle.pid, idle.pid].wait < 0.1
