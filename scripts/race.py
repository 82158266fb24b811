#!/usr/bin/env python3
"""Time to an accuracy, by the clock: the same training with several methods, on hosts whose links are slow. (root)

    race.py --hosts 4 --rates 100mbit,1gbit --methods none,fp16,iwp --option 'iwp:--density 1/29.3' --target 0.7 \\
        --out docs/results/race-resnet20 -- --data cifar10 --data-dir DATA_DIR --model resnet20 --epochs 4 --lr 0.3

Every rank has a network namespace of its own, whose egress is shaped (scripts/netlab.sh). What follows -- goes to
train.py in every run. OUT gets every run's JSON, race.md and race.png. A run whose result lies in OUT is not repeated,
so that a race that was interrupted goes on; for new times, race into another folder: clocks of different days, with
other things to do, do not compare. Runs are by MPI but for those of --gloo: which is faster, and with which settings,
depends on method and rate.

"seconds" is wall clock from the first step, without the tests, until the accuracy was the target, in a line between
the first test that reached it and the one before: test often (--eval-every 0.25, say, after --), or it is a guess. All
hosts share this machine's cores: computing is slower here than on hosts of their own, and the gain from sending less is
understated.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import table
from experiment import timing
from experiment.cli import end_by_exception, environments, split, texts
from experiment.comparison import Variant, variants
from experiment.lab import NoLab, check_rates, netlab
from experiment.runs import Failed, OtherConfiguration, Result, Run, complaint

#: Results by the rate of the links, and by the variant's label; each with its ``backend`` beside what train.py wrote.
Results = dict[str, dict[str, Result]]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    own, train = split(argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rates", type=texts, default=["100mbit", "1gbit"], help="of every link, or none")
    parser.add_argument("--methods", type=texts, default=["none", "fp16", "iwp"], help="compared with the first")
    parser.add_argument("--gloo", type=texts, default=[], metavar="RUNS", help="as none:1gbit,fp16:1gbit")
    parser.add_argument("--option", action="append", default=[], metavar="METHOD:OPTIONS", help="for one method only")
    parser.add_argument("--environment", action="append", default=[], metavar="METHOD:NAME=VALUE", help="of its ranks")
    parser.add_argument("--target", type=float, required=True, metavar="ACCURACY")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--timeout", type=float, default=7200, metavar="SECONDS", help="after which a run is killed")
    args = parser.parse_args(own)
    args.train = tuple(train)
    if args.hosts < 2:
        parser.error(f"--hosts must be at least 2, got {args.hosts}")
    try:
        args.variants = variants(args.methods, args.option)
        check_rates(args.rates)
        args.environments = environments(args.methods, args.environment)
        if unknown := set(args.gloo) - {f"{label}:{rate}" for label in args.methods for rate in args.rates}:
            raise ValueError(f"--gloo {','.join(sorted(unknown))}: expected METHOD:RATE, of those of this race")
    except ValueError as error:
        parser.error(str(error))
    return args


def stem(rate: str, label: str, backend: str) -> str:
    """The name of a run's files."""
    return f"{rate}-{label}-{backend}"


def parts(name: str) -> tuple[str, str, str]:
    """Rate, label and backend of a run with such a name. Labels may hold dashes."""
    rate, _, rest = name.partition("-")
    label, _, backend = rest.rpartition("-")
    return rate, label, backend


def trained(args: argparse.Namespace, rate: str, variant: Variant) -> Result:
    """The result, from its file if it is there. ``Failed``, ``NoLab`` or ``OtherConfiguration`` say why not."""
    arguments = (*args.train, "--compression", variant.method, *variant.options)
    backend = "gloo" if f"{variant.label}:{rate}" in args.gloo else "mpi"
    file = args.out / f"{stem(rate, variant.label, backend)}.json"
    run = Run(file, args.hosts, arguments, settings=args.environments[variant.label])
    result = run.result()
    if result is None:
        with netlab(args.hosts, rate, gloo=backend == "gloo") as place:
            result = replace(run, launcher=place.command).execute(args.timeout)
    if wrong := complaint(result):
        raise Failed(f"{run.name}: {wrong}")
    return {**result, "backend": backend}


def seconds_to(result: Result, target: float) -> float | None:
    """None if no test reached it."""
    there = timing.reached(result, target)
    return None if there is None else there[1]


def markdown(found: Results, target: float, base: str) -> str:
    """``base``: the method that the others are compared with, where it got there."""
    return table.markdown(header(f"steps to {target:g}"), cells(found, target, base), left=3)


def header(steps: str) -> list[str]:
    return ["links", "method", "backend", "MB a step", "step ms", steps, "seconds", "faster", "final accuracy"]


def cells(found: Results, target: float, base: str) -> list[list[str]]:
    """The table's rows, as :func:`markdown` says."""
    rows = []
    for rate, results in found.items():
        times = {label: seconds_to(result, target) for label, result in results.items()}
        theirs = times.get(base)
        for label, result in results.items():
            steps, seconds = timing.steps_to(result, target), times[label]
            rows.append(
                [
                    rate,
                    label,
                    result["backend"],
                    f"{result['wire_bytes_per_step'] / 1e6:.3f}",
                    f"{result['step_ms_median']:.0f}",
                    "-" if steps is None else f"{steps:,.0f}",
                    "-" if seconds is None else f"{seconds:.0f}",
                    "-" if seconds is None or theirs is None else f"{theirs / seconds:.2f}",
                    f"{result['test_accuracy']:.4f}",
                ]
            )
    return rows


def plot(found: Results, target: float, file: Path) -> None:
    """Test accuracy against the clock: a colour a method, a line style a rate."""
    labels = list(dict.fromkeys(label for results in found.values() for label in results))
    styles = ("-", "--", ":", "-.")
    about = {"xscale": "log", "xlabel": "seconds", "ylabel": "test accuracy"}
    with table.chart(file, len(labels), **about) as axes:
        for style, (rate, results) in zip(itertools.cycle(styles), found.items(), strict=False):
            for label, result in results.items():
                tested = [entry for entry in result["history"] if entry["test_accuracy"] is not None]
                times, reached = [e["seconds"] for e in tested], [e["test_accuracy"] for e in tested]
                color = f"C{labels.index(label)}"
                axes.plot(times, reached, style, marker=".", color=color, label=f"{label}, {rate}")
        axes.axhline(target, color="gray", linewidth=0.8)


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    found: Results = {}
    status = run(args, found)
    if found:
        text = markdown(found, args.target, args.variants[0].label)
        for label, settings in args.environments.items():
            if settings:
                text += f"\n\n{label} with " + ", ".join(f"{name}={value}" for name, value in settings.items())
        print(text)
        (args.out / "race.md").write_text(text + "\n")
        plot(found, args.target, args.out / "race.png")
    return status


def run(args: argparse.Namespace, found: Results) -> int:
    """The exit status; what was measured is in ``found``, however it ends."""
    failed = False
    for rate in args.rates:
        for variant in args.variants:
            try:
                result = trained(args, rate, variant)
            except (NoLab, OtherConfiguration) as error:
                print(f"race.py: {error}", file=sys.stderr)
                return 2
            except Failed as error:
                failed = True
                print(f"race.py: {error}", file=sys.stderr)
                continue
            found.setdefault(rate, {})[variant.label] = result
            print(f"{variant.label} at {rate}: {result['seconds']:.0f} s", file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    end_by_exception()
    sys.exit(main(sys.argv[1:]))
