"""Child processes that end as a whole: each leads a process group of its own."""

import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path


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
    """Runs a command as the leader of a process group.

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
    with log.open("w") as stream:
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
        finally:  # also when this program is interrupted: the child's session does not receive Ctrl-C
            if process.poll() is None:
                end_group(process)
    if check and status:
        raise Failed(f"{name} ended with status {status}\n{last_lines(log)}")


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
