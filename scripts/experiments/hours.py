#!/usr/bin/env python3
"""How long the experiments of scripts/measure.sh take: the table of docs/results.md, from the seconds of stored runs.

hours.py        writes the table; tests/docs/test_stated.py holds it current
"""

from pathlib import Path

import table
from experiment.files import script_parser
from experiment.result_file import read_runs

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "docs" / "results", ROOT / "docs" / "results.md"
MARK, END = "<!-- hours: written by scripts/experiments/hours.py -->\n", "<!-- end -->\n"
#: What the experiments train on, by how their names begin.
DATA = {
    "cifar10": "CIFAR-10",
    "vit": "CIFAR-10",
    "race": "CIFAR-10",
    "gpt": "Python's library",
    "digits": "scikit-learn",
    "nanogpt": "Shakespeare",
}


def hours(results: Path) -> dict[str, tuple[int, float]]:
    """Trainings and their hours, by experiment; of those whose runs have seconds."""
    found = dict[str, tuple[int, float]]()
    for file in sorted(results.rglob("runs.jsonl")):
        name = file.relative_to(results).parts[0]
        if not name.startswith(tuple(DATA)):
            continue
        seconds = [run["seconds"] for run in read_runs(file).values() if "seconds" in run]
        if seconds:
            count, before = found.get(name, (0, 0.0))
            found[name] = count + len(seconds), before + sum(seconds) / 3600
    return found


def page(text: str, results: Path) -> str:
    """The page, with the table as the results are now: experiments of one kind of data in a row."""
    rows = []
    for data in dict.fromkeys(DATA.values()):
        firsts = tuple(first for first, kind in DATA.items() if kind == data)
        parts = [
            f"`{name}` {spent:.1f} ({count})"
            for name, (count, spent) in hours(results).items()
            if name.startswith(firsts)
        ]
        rows.append({"data": data, "experiment, hours (trainings)": ", ".join(parts)})
    before, _, rest = text.partition(MARK)
    return f"{before}{MARK}\n{table.markdown(rows, left=2)}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    script_parser(__doc__).parse_args()
    PAGE.write_text(page(PAGE.read_text(), RESULTS))


if __name__ == "__main__":
    main()
