#!/usr/bin/env python3
"""Time to an accuracy, or to bits per byte, by the clock: the same training with several methods, on hosts with slow
links. (root)

    race.py --hosts 4 --rates 100mbit,1gbit --methods none,fp16,iwp --option 'iwp:--density 1/29.3' --target 0.7 \\
        --out docs/results/race-resnet20 -- --data cifar10 --data-dir DATA_DIR --model resnet20 --epochs 4 --lr 0.3

Every rank has a network namespace of its own, whose egress is shaped (netlab.sh). The arguments after -- go
to train.py in every run. OUT gets runs.jsonl and race.md. A run whose result lies in OUT/runs.jsonl is not repeated,
so an interrupted race can be continued; for new times use another folder. Horovod uses MPI; ddp-METHOD runs on torch
DDP.

"seconds" is wall clock from the first step, without the tests, until the test result was the target, interpolated
between the first test that reached it and the one before: test often (e.g. `--eval-every 0.25` after --). "speed-up" is
over the first method. All hosts share this machine's cores: computing is slower here than on hosts of their own, and
the gain from sending less is understated.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import table
from experiment import comparison, netlab
from experiment.comparison import Variant, texts
from experiment.files import script_parser
from experiment.quality import metric_of
from experiment.result_file import read_runs
from experiment.runs import Failed, OtherConfiguration, Result, Run, complaint

from hvd_compress.cli.network import bandwidth
from hvd_compress.cli.processes import exit_on_signals

#: Results by the rate of the links and the variant's label; each with its ``backend`` in addition to train.py's output.
Results = dict[str, dict[str, Result]]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    own, train = comparison.split(argv)
    parser = script_parser(__doc__)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rates", type=texts, default=["100mbit", "1gbit"], help="of every link, or none")
    comparison.add_arguments(parser, ["none", "fp16", "iwp"])
    parser.add_argument("--environment", action="append", default=[], metavar="METHOD:NAME=VALUE", help="of its ranks")
    parser.add_argument("--target", type=float, required=True, metavar="ACCURACY", help="or bits per byte")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--timeout", type=float, default=7200, metavar="SECONDS", help="after which a run is killed")
    args = parser.parse_args(own)
    args.train = train
    if args.hosts < 2:
        parser.error(f"--hosts must be at least 2, got {args.hosts}")
    try:
        args.variants = comparison.variants(args.methods, args.option)
        args.rates.sort(key=bandwidth)
        args.environments = comparison.environments(args.methods, args.environment)
    except ValueError as error:
        parser.error(str(error))
    return args


def trained(args: argparse.Namespace, rate: str, variant: Variant) -> Result:
    """The result, from its file if it is there. ``Failed``, ``NoLab`` or ``OtherConfiguration`` say why not."""
    arguments = (*args.train, "--compression", variant.method, "--host", variant.host, *variant.options)
    backend = "ddp" if variant.host == "ddp" else "mpi"
    path = args.out / "runs.jsonl" / f"{rate}-{variant.label}-{backend}"
    run = Run(path, args.hosts, arguments, settings=args.environments[variant.label])
    result = run.result()
    if result is None:
        with netlab.up(args.hosts, rate, backend) as launcher:
            result = replace(run, launcher=launcher).execute(args.timeout)
    if wrong := complaint(result):
        raise Failed(f"{run.name}: {wrong}")
    return {**result, "backend": backend}


def read(folder: Path) -> Results:
    """The results of a race, slow links and dense first. ``ValueError`` for runs that failed."""
    found: Results = {}
    for name, result in read_runs(folder / "runs.jsonl").items():
        rate, _, rest = name.partition("-")
        label, _, backend = rest.rpartition("-")  # labels may hold dashes
        if wrong := complaint(result):
            raise ValueError(f"{folder}/{name}: {wrong}")
        found.setdefault(rate, {})[label] = {**result, "backend": backend}
    return {
        rate: dict(sorted(found[rate].items(), key=lambda item: (item[0] != "none", item[0])))
        for rate in sorted(found, key=bandwidth)
    }


def reached(run: Result, target: float) -> tuple[float, float] | None:
    """Steps and seconds until the test result was ``target``, interpolated between the first test that reached it and
    the one before; None if no test reached it."""
    before, metric = None, metric_of(run)
    for entry in run["history"]:
        if entry[metric.key] is None:
            continue
        here = entry[metric.key], table.steps_at(run, entry), float(entry["seconds"])
        if metric.reached(here[0], target):
            if before is None:
                return here[1:]
            part = (target - before[0]) / (here[0] - before[0])
            return before[1] + part * (here[1] - before[1]), before[2] + part * (here[2] - before[2])
        before = here
    return None


def markdown(found: Results, target: float, base: str) -> str:
    """A row for each run; "-" where the target was not reached, or not by ``base``."""
    rows = []
    for rate, results in found.items():
        there = {label: reached(result, target) for label, result in results.items()}
        theirs = there.get(base)
        for label, result in results.items():
            mine = there[label]
            rows.append(
                {
                    "links": rate,
                    "method": f"{label} ({result['backend']})",
                    "step ms": f"{result['step_ms_median']:,.0f}",
                    f"steps to {target:g}": f"{mine[0]:,.0f}" if mine else "-",
                    "seconds": f"{mine[1]:.0f}" if mine else "-",
                    "speed-up": f"{theirs[1] / mine[1]:.2f}" if mine and theirs else "-",
                    f"final {metric_of(result).label.removeprefix('test ')}": f"{result[metric_of(result).key]:.4f}",
                }
            )
    return table.markdown(rows, left=2)


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    results: Results = {}
    status = 0
    for rate, variant in itertools.product(args.rates, args.variants):
        try:
            result = trained(args, rate, variant)
        except (netlab.NoLab, OtherConfiguration, Failed) as error:
            print(f"race.py: {error}", file=sys.stderr, flush=True)
            status = 1 if isinstance(error, Failed) else 2
            if status == 1:
                continue
            break
        results.setdefault(rate, {})[variant.label] = result
        print(f"{variant.label} at {rate}: {result['seconds']:.0f} s", file=sys.stderr, flush=True)
    if results:
        text = markdown(results, args.target, args.variants[0].label)
        print(text)
        (args.out / "race.md").write_text(text + "\n")
    return status


if __name__ == "__main__":
    with exit_on_signals():
        sys.exit(main(sys.argv[1:]))
