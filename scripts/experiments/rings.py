#!/usr/bin/env python3
"""List the commit of each stored run, and the ring with which it exchanged values of `Quantized`, `lloyd` and `range`.

    rings.py        writes docs/results/rings.md, the runs of older rings (tests/docs/test_rings.py holds it current)

The history of the repository is needed.
"""

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import table
from experiment.files import script_parser
from experiment.result_file import Result, read_lines

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
PAGE = RESULTS / "rings.md"
#: The commits that changed the ring. What is older than all of them is of ring A.
CHANGES = {"B": "3402db7f37962d8faa978eb0589c7a29eaa1b458", "C": "0911b73ae1f205447878596fce19b51529017771"}
HEAD = """# Runs of older rings

Stored runs whose values went over another ring than today's ([what changed](../results.md#rings)), by the commit of
their code. Written by `scripts/experiments/rings.py`.

"""


class Row(NamedTuple):
    """A run, and of one with a row for each method, the method; of others it is that of their training."""

    experiment: str
    run: Result
    method: str

    @property
    def commit(self) -> str:
        """The commit of its code; of a run that recorded none that is in this repository, that which stored it."""
        recorded = self.run.get("config", self.run).get("git_commit") or ""
        return recorded.removesuffix("-dirty") if "stored" not in self.run else self.run["stored"]

    @property
    def date(self) -> str:
        """The day of the commit."""
        return commits()[self.commit]

    @property
    def ring(self) -> str:
        """A, B or C, or nothing if its values went over no ring."""
        if not _on_the_ring(self.method, self.run.get("config", {})):
            return ""
        return max((name for name in CHANGES if self.commit in since(name)), default="A")


def _on_the_ring(method: str, config: Result) -> bool:
    """Tells whether a method's values go over the ring of ``CodedRing``."""
    kind = re.sub(r"^(ddp-)?(hvd-)?", "", method).partition("@")[0].lower()
    gathers = "gather" in method or config.get("exchange") == "gather"
    of_its_own = kind in ("quantized", "low_bit") or (kind == "demo" and not config.get("values"))
    coded = re.match(r"(lloyd|range)\d+$", str(config.get("values")))
    return (of_its_own or bool(coded)) and not gathers


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def missing() -> str:
    """Why the history is not here, or nothing."""
    try:
        return "the clone is shallow" if git("rev-parse", "--is-shallow-repository") == "true" else ""
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"


@cache
def commits() -> dict[str, str]:
    """All commits of the history, with their days."""
    return dict(line.split() for line in git("log", "--format=%H %cs").splitlines())


@cache
def since(change: str) -> frozenset[str]:
    """The commits whose code has a change of the ring."""
    first = CHANGES[change]
    return frozenset([first, *git("rev-list", "--ancestry-path", f"{first}..HEAD").splitlines()])


def rows(results: Path = RESULTS) -> Iterator[Row]:
    """All stored runs."""
    for file in sorted(results.rglob("runs.jsonl")):
        experiment = file.parent.relative_to(results).as_posix()
        for run in read_lines(file):
            method = run.get("config", {}).get("compression")
            inside = [row["method"] for row in run.get("rows", []) if "method" in row]
            for name in dict.fromkeys([method] if method else inside or [METHODS.get(experiment, "")]):
                yield Row(experiment, run, name)


#: The methods of experiments whose runs do not name them.
METHODS = {"peers-quality": "low_bit", "far-apart": "low_bit", "scaling": "low_bit"}


def page(results: Path = RESULTS) -> str:
    """The page of runs of older rings: those of one commit and method in a row."""
    found: dict[tuple[str, str, str, str, str], list[str]] = {}
    for row in rows(results):
        if row.ring not in ("", max(CHANGES)):
            key = row.ring, row.experiment, row.method, row.commit[:7], row.date
            found.setdefault(key, []).append(row.run["name"])
    titles = ("ring", "experiment", "method", "commit", "of")
    listed = [{**dict(zip(titles, key, strict=True)), "runs": ", ".join(names)} for key, names in sorted(found.items())]
    return f"{HEAD}{table.markdown(listed, left=6)}\n"


def main() -> None:
    script_parser(__doc__).parse_args()
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
