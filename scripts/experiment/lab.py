"""Where ranks run: on this machine's loopback, or on the hosts of a netlab that comes and goes with the run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from experiment import timing
from experiment.runs import SCRIPTS


@dataclass(frozen=True)
class Place:
    """How ranks are started there, through which interface they talk, and where a port is free on rank 0's host."""

    command: tuple[str, ...]
    interface: str
    master: str


def check_rates(rates: Iterable[str]) -> None:
    """Raises ``ValueError`` for one that is neither a bandwidth nor none."""
    for rate in rates:
        if rate != "none":
            timing.bandwidth(rate)


class NoLab(Exception):
    """The hosts could not be made; says why."""


@contextmanager
def loopback(ranks: int, gloo: bool) -> Iterator[Place]:
    """All ranks on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start = ("bash", str(SCRIPTS / "run.sh"), *(["--gloo"] if gloo else []), str(ranks))
    yield Place(start, "lo", f"127.0.0.1:{port}")


@contextmanager
def netlab(hosts: int, rate: str, gloo: bool) -> Iterator[Place]:
    """A rank on each of so many hosts; the hosts are gone afterwards, and with them all that still ran there, whatever
    happened. Programs may have their labs side by side: a lab is named by its process."""
    lab = ("bash", str(SCRIPTS / "netlab.sh"), "--lab", f"b{os.getpid()}")
    try:
        up = subprocess.run([*lab, "up", str(hosts), rate], capture_output=True, text=True, check=False)
        if up.returncode:
            raise NoLab(f"no network namespaces here (they need root and iproute2): {up.stderr.strip()[-300:]}")
        start = (*lab, "run", *(["--gloo"] if gloo else []), str(hosts))
        yield Place(start, "eth0", "10.77.0.1:29511")
    finally:
        with _undisturbed():
            subprocess.run([*lab, "down"], check=False, start_new_session=True)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C has to wait."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
