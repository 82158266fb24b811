"""Where ranks run: on this machine's loopback, or on the hosts of a netlab that exists as long as the run."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from experiment.runs import SCRIPTS

COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")  # of a netlab host, read inside it
LAUNCHERS = {"mpi": (), "ddp": ("--ddp",)}  # options of run.sh and of netlab.sh run


class NoLab(Exception):
    """The hosts could not be made; says why."""


def loopback(ranks: int, launcher: str) -> tuple[str, ...]:
    """The command that starts ranks on this machine."""
    return "bash", str(SCRIPTS / "run.sh"), *LAUNCHERS[launcher], str(ranks)


@contextmanager
def up(hosts: int, rate: str, launcher: str, per_host: int = 1, delay: str | None = None) -> Iterator[tuple[str, ...]]:
    """The command that starts ``per_host`` ranks on each of so many hosts; afterwards the hosts are removed, with
    everything that still runs there. A lab is named by its process, so that several can exist at once. ``delay``: of
    the links, one way, as 25ms."""
    netlab = ("bash", str(SCRIPTS / "lab" / "netlab.sh"), "--lab", f"b{os.getpid()}")
    try:
        done = subprocess.run(
            [*netlab, "up", str(hosts), rate, *filter(None, [delay])], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise NoLab(f"no network namespaces here (they need root and iproute2): {done.stderr.strip()[-300:]}")
        yield *netlab, "run", *LAUNCHERS[launcher], f"{hosts}x{per_host}"
    finally:
        # A second Ctrl-C must not interrupt the removal.
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
        subprocess.run([*netlab, "down"], check=False, start_new_session=True)
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
