#!/usr/bin/env python3
"""Print how long the threads of processes run, and how long they wait for a core.

    threads.py --seconds 10 $(pgrep -f '^python .*exchange_rank.py')        the ranks of bench_exchange.py

run and wait are seconds in the interval, slices the turns on a core, state that of /proc at its end: R runs or waits
for a core, S sleeps. A thread that mostly waits is starved by others; one that runs without progress spins. Linux
divides the cores between sessions first (autogroups). As root, the script has real-time priority: it would wait, too.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Sample(NamedTuple):
    """A thread's counters since its start."""

    run: float
    wait: float
    slices: int
    state: str


class Thread:
    """Run and wait seconds since the first sample. The kernel counts a wait, whenever it began, when it ends. One that
    has not ended counts from the first of the equal, runnable samples at the end."""

    def __init__(self, time: float, sample: Sample) -> None:
        self.begin, self.first, self.last, self.since, self.now = time, sample, sample, time, time

    def add(self, time: float, sample: Sample) -> None:
        if sample != self.last or sample.state != "R":
            self.since = time
        self.last, self.now = sample, time
        self.run, self.slices = sample.run - self.first.run, sample.slices - self.first.slices
        self.wait = min(sample.wait - self.first.wait + time - self.since, time - self.begin - self.run)


def read(pid: int) -> Iterator[tuple[tuple[int, int], Sample]]:
    """(process, thread) and counters of each thread of a process; nothing if it has ended."""
    for folder in Path(f"/proc/{pid}/task").glob("*"):
        try:
            run, wait, slices = map(int, (folder / "schedstat").read_text().split())
            state = (folder / "stat").read_text().rpartition(") ")[2][0]
        except OSError:
            continue
        yield (pid, int(folder.name)), Sample(run / 1e9, wait / 1e9, slices, state)


def measure(pids: list[int], seconds: float) -> dict[tuple[int, int], Thread]:
    """By process and thread. Those that begin later are measured from then on."""
    found, end = dict[tuple[int, int], Thread](), time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        for key, sample in (pair for pid in pids for pair in read(pid)):
            found.setdefault(key, Thread(now, sample)).add(now, sample)
        time.sleep(0.1)
    return found


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("pids", type=int, nargs="+", metavar="PID")
    args = parser.parse_args(argv)
    sessions = {pid: os.getsid(pid) for pid in args.pids}
    if os.geteuid() == 0:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    found = measure(args.pids, args.seconds)
    print(f"load {Path('/proc/loadavg').read_text()}  session   process    thread   run s  wait s   slices state")
    for (pid, tid), one in sorted(found.items()):
        print(f"{sessions[pid]:9} {pid:9} {tid:9} {one.run:7.2f} {one.wait:7.2f} {one.slices:8} {one.last.state:>5}")


if __name__ == "__main__":
    main(sys.argv[1:])
