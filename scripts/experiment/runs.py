"""One training run as a child process: what it was asked for, whether its result is there already, and its end.

A run is `train.py` under `run.sh` or in a netlab, in a process group of its own, so that a run that hangs can be ended
as a whole without touching anything else.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiment.older import complete

Result = dict[str, Any]

SCRIPTS = Path(__file__).resolve().parents[1]
# What a run may differ in and still be the same: where files lie, and what is shown meanwhile.
NOT_ASKED = {"json", "trace", "data_dir", "progress"}


class OtherConfiguration(Exception):
    """The result's file was written by a run with other options."""


class Failed(Exception):
    """A run that ended badly, with its last lines."""


@dataclass(frozen=True)
class Run:
    file: Path  # where train.py writes the result; the log lies beside it
    ranks: int
    arguments: tuple[str, ...]  # of train.py
    #: What starts so many ranks of a script; by default run.sh, on this machine.
    launcher: tuple[str, ...] = ()
    #: Settings of Horovod and Open MPI for the ranks, beside this program's own environment.
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.file.stem

    def command(self) -> list[str]:
        launcher = self.launcher or ("bash", str(SCRIPTS / "run.sh"), str(self.ranks))
        return [*launcher, str(SCRIPTS / "train.py"), "--json", str(self.file), "--no-progress", *self.arguments]

    def configuration(self) -> dict[str, Any]:
        """All options, defaults included, as train.py records them. Wrong ones end the program, with a message."""
        import train  # needs Horovod, which a look at the methods does not

        options = vars(train.parse(list(self.arguments))).items()
        texts = {key: str(value) if isinstance(value, Path) else value for key, value in options}
        asked: dict[str, Any] = json.loads(json.dumps(texts))
        return {**{key: value for key, value in asked.items() if key not in NOT_ASKED}, "ranks": self.ranks}

    def asked(self) -> dict[str, str]:
        """All settings of Horovod and Open MPI that it is started with; ranks also see those of their launchers."""
        own = {name: value for name, value in os.environ.items() if name.startswith(("HOROVOD_", "OMPI_MCA_"))}
        return dict(sorted({**own, **self.settings}.items()))

    def result(self) -> Result | None:
        """What an earlier run has written, if it was asked for the same; ``OtherConfiguration`` if for something else.

        A file that is no JSON is what a killed run has left of it: as if it were not there.
        """
        try:
            found: Result = json.loads(self.file.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        asked, given = self.configuration(), {**complete(found["config"]), "ranks": found["ranks"]}
        said = found.get("asked")  # older results only have what ranks saw, the launchers' own settings among it
        asked |= self.settings if said is None else {**dict.fromkeys(said), **self.asked()}
        given |= {**(given.get("settings") or {}), **(said or {})}
        other = [f"{key} {given.get(key)!r}, not {value!r}" for key, value in asked.items() if given.get(key) != value]
        if other:
            raise OtherConfiguration(f"{self.file} is of a run with {'; '.join(other)}: remove it, or write elsewhere")
        return found

    def execute(self, timeout: float) -> Result:
        """Runs it now; ``Failed`` if it takes more than so many seconds, or ends with an error and without a result.

        A diverged run ends with an error and a result: see :func:`complaint`.
        """
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.unlink(missing_ok=True)
        log = self.file.with_suffix(".log")
        with log.open("w") as stream:
            status = run_group(self.command(), timeout, stream, self.settings)
        if status is None:
            raise Failed(f"{self.name} was killed after {timeout:g} s\n{last_lines(log)}")
        try:
            result = self.result()
        except OtherConfiguration as error:  # a method that changes its own options, a launcher that keeps a setting
            raise Failed(f"{self.name} did not do what it was asked for: {error}") from error
        if result is None:
            raise Failed(f"{self.name} ended with status {status}\n{last_lines(log)}")
        result["asked"] = self.asked()
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(result, indent=1) + "\n")
        new.replace(self.file)
        return result


def run_group(
    command: list[str], timeout: float, output: Any, environment: Mapping[str, str] | None = None
) -> int | None:
    """The exit status of a child that leads a process group, with ``environment`` beside this program's; None if it
    took too long and the group was killed."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    )
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:  # also when this program is interrupted: the child's session does not see Ctrl-C
        if process.poll() is None:
            end_group(process)


def end_group(process: subprocess.Popen[bytes], grace: float = 10.0) -> None:
    """Asks the group to end, since mpirun then takes its ranks along, which lead groups of their own; then kills it."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def complaint(result: Result) -> str | None:
    """What is wrong with a run that came to its end, if anything is."""
    if not math.isfinite(result["train_loss"]):
        return f"its loss is {result['train_loss']}"
    return None if result["replicas_equal"] else "its replicas differ"


def last_lines(file: Path, count: int = 15) -> str:
    return "\n".join(f"    {line}" for line in file.read_text(errors="replace").splitlines()[-count:])
