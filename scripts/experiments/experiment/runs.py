"""One training run as a child process: its configuration, its result if it is there already, and its end.

A run is `train.py` under `run.sh` or in a netlab, in a process group of its own, so that a run that hangs can be ended
as a whole without touching anything else.
"""

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiment.files import plain
from experiment.result_file import Result, read_runs, write_run
from hvd_compress.cli.processes import Failed, last_lines, run_group

SCRIPTS = Path(__file__).resolve().parents[2]
# What a run may differ in and still be the same: where files lie.
NOT_ASKED = {"json", "data_dir"}


class OtherConfiguration(Exception):
    """The result was written by a run with other options."""


@dataclass(frozen=True)
class Run:
    path: Path  # FILE.jsonl/NAME, where train.py writes the result; the log is FILE/NAME.log
    ranks: int
    arguments: tuple[str, ...]  # of train.py
    #: The command that starts so many ranks of a script; by default run.sh, on this machine.
    launcher: tuple[str, ...] = ()
    #: Settings of Horovod and Open MPI for the ranks, in addition to this program's own environment.
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.name

    def command(self) -> list[str]:
        host = self.configuration()["host"]
        train = (str(SCRIPTS / "experiments" / "train.py"), "--json", str(self.path), *self.arguments)
        if host == "threads":
            return [sys.executable, *train, "--ranks", str(self.ranks)]
        ddp = ("--ddp",) if host in ("ddp", "fsdp") else ()
        return [*(self.launcher or ("bash", str(SCRIPTS / "run.sh"), *ddp, str(self.ranks))), *train]

    def configuration(self) -> dict[str, Any]:
        """All options, defaults included, as train.py records them. Wrong ones end the program, with a message."""
        import train

        asked: dict[str, Any] = json.loads(json.dumps(plain(vars(train.parse(list(self.arguments))))))
        return {**{key: value for key, value in asked.items() if key not in NOT_ASKED}, "ranks": self.ranks}

    def result(self) -> Result | None:
        """What an earlier run with the same options has written; ``OtherConfiguration`` if its options were others. An
        option that it did not have yet is not compared."""
        try:
            found = read_runs(self.path.parent)[self.name]
        except (FileNotFoundError, KeyError):
            return None
        given, seen = {**found["config"], "ranks": found["ranks"]}, found["config"].get("settings") or {}
        asked = [(key, given.get(key, value), value) for key, value in self.configuration().items()]
        settings = {**dict.fromkeys(found.get("asked", {})), **self.settings}
        asked += [(key, seen.get(key), value) for key, value in settings.items()]
        other = [f"{key} {there!r}, not {value!r}" for key, there, value in asked if there != value]
        if other:
            raise OtherConfiguration(f"{self.path} is of a run with {'; '.join(other)}: remove it, or write elsewhere")
        return found

    def execute(self, timeout: float) -> Result:
        """Runs it now; ``Failed`` if it takes more than so many seconds or ends without a result.

        A diverged run ends with an error and a result: see :func:`complaint`.
        """
        log = self.path.parent.with_suffix("") / f"{self.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        run_group(self.command(), timeout, log, self.settings, self.name, check=False)
        try:
            result = self.result()
        except OtherConfiguration as error:  # a method that changes its own options, a launcher that keeps a setting
            raise Failed(f"{self.name} ran with other options: {error}") from error
        if result is None:
            raise Failed(f"{self.name} ended without a result\n{last_lines(log)}")
        result["asked"] = dict(self.settings)
        write_run(self.path, result)
        return result


def complaint(result: Result) -> str | None:
    """What is wrong with a run that came to its end, if anything."""
    if not math.isfinite(result["train_loss"]):
        return f"its loss is {result['train_loss']}"
    return None if result["replicas_equal"] else "its replicas differ"
