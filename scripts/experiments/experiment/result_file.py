"""Results of an experiment: a `.jsonl` file with one run a line, as JSON with the run's name. A run is addressed as
FILE.jsonl/NAME."""

import argparse
import fcntl
import json
import os
from pathlib import Path
from typing import Any

Result = dict[str, Any]


def run_path(text: str) -> Path:
    """FILE.jsonl/NAME, for argparse."""
    path = Path(text)
    if path.parent.suffix != ".jsonl":
        raise argparse.ArgumentTypeError(f"{text}: expected FILE.jsonl/NAME")
    return path


def read_lines(file: Path) -> list[Result]:
    """All runs of a file, in its order; those of simulations have no names."""
    return list(map(json.loads, file.read_text().splitlines()))


def read_runs(file: Path) -> dict[str, Result]:
    """All runs of a file by name, in its order."""
    return {run["name"]: run for run in read_lines(file)}


def write_run(path: Path | None, content: Result) -> None:
    """Appends the run to its file, or replaces the run of that name, where a path was given.

    The file is replaced as a whole, so a killed process leaves no part of a line. A lock on the folder lets several
    processes write at the same time.
    """
    if path is None:
        return
    file = path.parent
    file.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        runs = read_runs(file) if file.exists() else {}
        runs[path.name] = {"name": path.name, **content}
        new = file.with_suffix(".new")
        new.write_text("".join(json.dumps(run, separators=(",", ":")) + "\n" for run in runs.values()))
        new.replace(file)
    finally:
        os.close(folder)
