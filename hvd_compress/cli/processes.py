"""Child processes that end as a whole: each leads a process group of its own."""

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

#: Signals that end this program, and their handlers before it sets its own.
SIGNALS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
#: Seconds from SIGTERM to SIGKILL. mpirun and torchrun need them to end their ranks.
GRACE = 10.0
# Of prctl().
_SUBREAPER = 36
#: The variables that torchrun sets for a rank.
TORCHRUN = re.compile("((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")


class Failed(Exception):
    """A child that ended badly, with its last lines."""


def run_group(
    command: list[str],
    timeout: float,
    log: Path,
    environment: Mapping[str, str],
    name: str,
    check: bool = True,
    watch: Callable[[], None] = lambda: None,
) -> None:
    """Runs a command as the leader of a process group, and ends the group when the leader has ended, or on an
    exception, such as those of :func:`exit_on_signals`. Raises :class:`Failed` if it took more than ``timeout``
    seconds, or, with ``check``, ended with another status than 0.

    Args:
        log: file for the command's output.
        environment: variables in addition to this program's (:func:`inherited`).
        name: of the run, for messages.
        watch: called several times a second meanwhile.
    """
    with suppress(AttributeError):  # Linux: processes whose parents have ended become children of this one
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    end, others = time.monotonic() + timeout, _children()
    with log.open("w") as stream:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**inherited(), **without_proxy(), **environment},
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                if time.monotonic() > end:
                    raise Failed(f"{name} was killed after {timeout:g} s\n{last_lines(log)}")
                watch()
                time.sleep(0.1)
        finally:  # the child leads its own session, which receives neither Ctrl-C nor this program's SIGTERM
            end_group(process)
            _end_orphans(others)
    if check and process.returncode:
        raise Failed(f"{name} ended with status {process.returncode}\n{last_lines(log)}")


def inherited() -> dict[str, str]:
    """The environment for a launch. If this program is a rank itself (under torchrun, in a pod of a Kubernetes job),
    torchrun's variables are left out: all ranks of the launch would take this program's number."""
    is_rank = "RANK" in os.environ
    return {name: value for name, value in os.environ.items() if not (is_rank and TORCHRUN.fullmatch(name))}


def without_proxy() -> dict[str, str]:
    """Variables by which the processes of a launch reach those of this machine without the user's proxy."""
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    direct = given if given == "*" else f"{given},localhost,127.0.0.1,{socket.gethostname()}".lstrip(",")
    return {"no_proxy": direct, "NO_PROXY": direct}


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """A context in which SIGTERM and SIGHUP raise SystemExit, and Ctrl-C KeyboardInterrupt, so that ``finally`` and
    ``with`` clean up; further signals are then ignored. Signals that were ignored (SIGHUP under nohup) or handled by
    the program stay so. Does nothing outside the main thread, where handlers cannot be set."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: handler for number, handler in SIGNALS.items() if main and signal.getsignal(number) is handler}

    def leave(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    try:
        for number in before:
            signal.signal(number, leave)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Terminates the group, then kills the rest of it: the group can outlive its leader. (On SIGTERM, mpirun also ends
    its ranks, which lead groups of their own.)"""
    end = time.monotonic() + GRACE
    with suppress(ProcessLookupError):  # the group is empty
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < end:
            if process.poll() is not None:  # what has ended belongs to the group until somebody has asked
                with suppress(ChildProcessError):
                    os.waitpid(-process.pid, os.WNOHANG)
            os.killpg(process.pid, 0)
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _children() -> set[int]:
    found = set()
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            number, _, rest = file.read_text().partition(" ")
            if int(rest.rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(number))
    return found


def _end_orphans(others: set[int]) -> None:
    """Kills children that are not ``others``: ranks lead groups of their own, and torchrun, ended while it starts them,
    leaves them behind."""
    while orphans := _children() - others:
        for child in orphans:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def last_lines(file: Path, count: int = 15) -> str:
    """The end of a log, indented."""
    return "\n".join(f"    {line}" for line in file.read_text(errors="replace").splitlines()[-count:])
