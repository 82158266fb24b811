"""Child processes that end as a whole: each leads a process group of its own."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


class Failed(Exception):
    """A child that ended badly, with its last lines."""


def run_group(
    command: list[str],
    timeout: float,
    log: Path,
    environment: Mapping[str, str],
    name: str,
    check: bool = True,
    watch: Callable[[], None] | None = None,
) -> None:
    """Runs a command as the leader of a process group. SIGTERM and SIGHUP end the group, then this program.

    Args:
        timeout: seconds after which the group is killed.
        log: file for what it prints.
        environment: in addition to this program's.
        name: of the run, for messages.
        check: whether an exit status other than 0 is a failure.
        watch: called several times a second while it runs.

    Raises:
        Failed: it took too long, or ended with another status than 0.
    """
    with log.open("w") as stream, exit_on_signals():
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        try:
            status = _wait(process, timeout, watch)
        except subprocess.TimeoutExpired:
            raise Failed(f"{name} was killed after {timeout:g} s\n{last_lines(log)}") from None
        finally:  # the child leads its own session, which receives neither Ctrl-C nor this program's SIGTERM
            if process.poll() is None:
                end_group(process)
    if check and status:
        raise Failed(f"{name} ended with status {status}\n{last_lines(log)}")


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit, so that ``finally`` and ``with`` clean up. Further ones are ignored
    meanwhile. A signal that is ignored (SIGHUP under nohup) or handled by the program stays so. Threads other than the
    main one cannot set handlers: there it does nothing."""
    numbers: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    if threading.current_thread() is threading.main_thread():
        numbers += [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _wait(process: subprocess.Popen[bytes], timeout: float, watch: Callable[[], None] | None) -> int:
    if watch is None:
        return process.wait(timeout)
    for _ in range(max(1, int(timeout / 0.2))):
        watch()
        try:
            return process.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    raise subprocess.TimeoutExpired(process.args, timeout)


def end_group(process: subprocess.Popen[bytes], grace: float = 10.0) -> None:
    """Terminates the group, then kills it: on SIGTERM, mpirun also ends its ranks, which lead groups of their own."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def last_lines(file: Path, count: int = 15) -> str:
    """The end of a log, indented."""
    return "\n".join(f"    {line}" for line in file.read_text(errors="replace").splitlines()[-count:])
