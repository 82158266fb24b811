#!/usr/bin/env python3
"""Several races (scripts/race.py) in one table and one plot, from the results that lie in their folders.

    races.py docs/results/race-resnet20:0.7 docs/results/race-vgg11:0.6 --plot docs/results/races.png

Each is FOLDER:TARGET. Seconds, and what they are compared with ("none", dense), are as in race.py; which
settings of Horovod and MPI the runs had is in the race.md of each folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import race
import table
from experiment.runs import complaint
from experiment.timing import bandwidth

BASE = "none"


@dataclass(frozen=True)
class Race:
    network: str
    target: float
    found: race.Results  # slow links first, dense first


def read(text: str) -> Race:
    """The race of FOLDER:TARGET. ``ValueError`` says what is wrong with it."""
    folder, _, target = text.rpartition(":")
    files = sorted(Path(folder).glob("*.json")) if folder else []
    if not files:
        raise ValueError(f"expected FOLDER:TARGET, of a race with results, got {text!r}")
    found: race.Results = {}
    networks = set()
    for file in files:
        rate, label, backend = race.parts(file.stem)
        result = json.loads(file.read_text())
        if wrong := complaint(result):
            raise ValueError(f"{file}: {wrong}")
        if label in found.setdefault(rate, {}):
            raise ValueError(f"{folder} holds two results of {label} at {rate}")
        found[rate][label] = {**result, "backend": backend}
        networks.add(result["config"]["model"])
    if len(networks) > 1:
        raise ValueError(f"{folder} holds results of several networks: {', '.join(sorted(networks))}")
    ordered = {
        rate: dict(sorted(found[rate].items(), key=lambda item: (item[0] != BASE, item[0])))
        for rate in sorted(found, key=lambda rate: float("inf") if rate == "none" else bandwidth(rate))
    }
    return Race(networks.pop(), float(target), ordered)


def markdown(races: Sequence[Race]) -> str:
    rows = [
        [race_.network, f"{race_.target:g}", *cells]
        for race_ in races
        for cells in race.cells(race_.found, race_.target, BASE)
    ]
    return table.markdown(["network", "to", *race.header("steps")], rows, left=5)


def reached(groups: Sequence[tuple[Race, str]], label: str) -> dict[int, float]:
    """Seconds by the group's number, of those groups in which the method reached the target."""
    times = {
        place: race.seconds_to(race_.found[rate][label], race_.target)
        for place, (race_, rate) in enumerate(groups)
        if label in race_.found[rate]
    }
    return {place: seconds for place, seconds in times.items() if seconds is not None}


def plot(races: Sequence[Race], file: Path) -> None:
    """Bars of seconds, a group for each race and rate, a colour for each method; none where the target was missed."""
    groups = [(race_, rate) for race_ in races for rate in race_.found]
    labels = list(dict.fromkeys(label for race_, rate in groups for label in race_.found[rate]))
    with table.chart(file, len(labels), ylabel="seconds to the accuracy") as axes:
        for number, label in enumerate(labels):
            offset, width = table.beside(number, len(labels))
            if times := reached(groups, label):
                places = [place + offset for place in times]
                bars = axes.bar(places, list(times.values()), width, color=f"C{number}", label=label)
                axes.bar_label(bars, fmt="{:.0f}", fontsize="small")
        names = [f"{race_.network} to {race_.target:g}\n{rate}" for race_, rate in groups]
        axes.set_xticks(range(len(groups)), labels=names)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("races", nargs="+", metavar="FOLDER:TARGET")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    try:
        races = [read(text) for text in args.races]
    except ValueError as error:
        parser.error(str(error))
    print(markdown(races))
    if args.plot:
        plot(races, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
