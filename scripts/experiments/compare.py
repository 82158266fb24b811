#!/usr/bin/env python3
"""Compare methods with the same data, model, epochs and seeds and, if asked for, the same bytes; tables.

    compare.py --methods none,fp16,iwp,topk --seeds 0,1,2 --ranks 4 --out results/compare-digits \\
        --data digits --model cnn --epochs 12 --budgets 1/64,1/16 --momentum-correction -- --batch-size 16 --lr 0.1

    compare.py --methods none,iwp@16,topk --option 'iwp@16:--density 1/16' --lrs 1e-3,3e-3,6e-3 --seeds 0,1,2 \\
        --simulate --data text --model gpt --epochs 15 --out results/compare-gpt -- --optimizer adamw

The arguments after -- go to train.py in every run. A method may run in several variants, METHOD@NAME, each with options
of its own: `--methods iwp,iwp@one --option 'iwp@one:--leaders 1'`; ddp-METHOD runs on torch DDP.

A budget is a share of the dense bytes. What a step sends besides the selected entries (tensors sent dense, scales,
padding) differs between methods and models, so the density for a budget is found by short runs. An
interrupted call can be repeated: a run whose result lies in OUT (runs.jsonl, probes.jsonl) is not run again. OUT also
gets table.md.

With several learning rates, each row is trained with all of them by the first seed, and by the other seeds with the
best of these. --simulate runs the ranks of a training in one process, in turn, on one core and without Horovod. To use
more cores, call it with other --methods and the same OUT at the same time, and at last with all of them.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import table
from experiment import comparison, compressors
from experiment.comparison import Variant
from experiment.data import DATASETS
from experiment.files import script_parser
from experiment.models import MODELS
from experiment.quality import metric_of
from experiment.runs import Failed, OtherConfiguration, Result, Run, complaint

from hvd_compress.cli.processes import exit_on_signals

# A probe counts bytes, without what a method sends once in a hundred steps (budgets, checks), which is little. With
# local steps it has at least this many periods.
PROBE_STEPS, PROBE_PERIODS = 20, 2
# The densities of the first two probes: low enough for the budgets that matter, and far apart.
PROBES = (1 / 64, 1 / 8)

Point = tuple[float, float]  # density, share of the dense bytes
Decisions = dict[str, dict[str, Point | str]]  # by label and budget; or why no density reaches it


@dataclass(frozen=True)
class Row:
    """A variant at a budget that it reaches, or at its own ratio; it is trained by every seed."""

    variant: Variant
    name: str
    density: tuple[str, ...]  # arguments


class Unreachable(Exception):
    """No density gives this share; says why."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    own, train = comparison.split(argv)
    parser = script_parser(__doc__)
    horovod = [name for name, method in compressors.METHODS.items() if "horovod" in method.hosts]
    comparison.add_arguments(parser, horovod)
    parser.add_argument("--momentum-correction", action="store_true", help="and --dense-values fp16, where they exist")
    parser.add_argument("--budgets", type=comparison.texts, default=[], help="shares of the dense bytes, as 1/64,1/16")
    parser.add_argument("--data", choices=DATASETS, default="digits")
    parser.add_argument("--model", choices=MODELS, default="cnn")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seeds", type=lambda text: list(map(int, text.split(","))), default=[0])
    parser.add_argument(
        "--lrs", action="append", default=[], metavar="RATES", help="as 1e-3,3e-3; METHOD:RATES for one row"
    )
    parser.add_argument("--simulate", action="store_true", help="all ranks in one process")
    parser.add_argument("--out", type=Path, default=Path("results/compare"))
    parser.add_argument("--timeout", type=float, default=3600, metavar="SECONDS", help="after which a run is killed")
    args = parser.parse_args(own)
    args.train = train
    try:
        args.variants = comparison.variants(args.methods, args.option)
        args.rates = comparison.learning_rates(args.methods, args.lrs)
        if args.simulate:
            if other := [variant.label for variant in args.variants if variant.host != "horovod"]:
                raise ValueError(f"--simulate replaces Horovod, not torch DDP: {', '.join(other)}")
            args.variants = [replace(variant, host="threads") for variant in args.variants]
        if not all(0 < Fraction(text) <= 1 for text in args.budgets):
            raise ValueError(f"a budget is a share of the dense bytes, as 1/64; got {','.join(args.budgets)}")
    except (ValueError, ZeroDivisionError) as error:
        parser.error(str(error))
    if fixed := [option for option in args.option if args.budgets and "--density" in option]:
        parser.error(f"--option {fixed[0]!r}: with --budgets, the density is determined by the budget")
    return args


def find(measure: Callable[[float], float], target: float, tolerance: float = 0.01) -> Point:
    """The density that gives the share ``target`` of the dense bytes, and the share measured there: bytes are nearly
    affine in the density. It is corrected once if it is off by more than ``tolerance`` of the target."""
    low, high = ((density, measure(density)) for density in PROBES)
    density = _solve(low, high, target)
    guess = (density, measure(density))
    if abs(guess[1] - target) <= tolerance * target:
        return guess
    density = _solve(min(low, high, key=lambda point: abs(point[1] - guess[1])), guess, target)
    return min(guess, (density, measure(density)), key=lambda point: abs(point[1] - target))


def _solve(one: Point, other: Point, target: float) -> float:
    """Where the line through two points reaches ``target``; to four digits, so that it can be read and typed."""
    slope = (other[1] - one[1]) / (other[0] - one[0])
    if not slope > 0.0:
        raise Unreachable("its bytes do not grow with the density")
    density = one[0] + (target - one[1]) / slope
    if density > 1.0:
        raise Unreachable("all entries together are fewer bytes")
    if density <= 0.0:
        raise Unreachable("what it sends besides the selected entries is more")
    return float(f"{density:.4g}")


class Comparison:
    """Runs what is left to run, and writes the report."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.failures: list[str] = []

    def arguments(self, variant: Variant, seed: int) -> tuple[str, ...]:
        """Of train.py, where later ones win: a variant's own options override what is compared, those after -- do
        not."""
        args, own = self.args, ["--compression", variant.method, "--host", variant.host, "--seed", str(seed)]
        has_own_momentum = compressors.METHODS[variant.method].optimizer == "plain"
        own += ["--optimizer", "plain"] if has_own_momentum else []
        if args.momentum_correction:
            own += ["--momentum-correction"] if variant.has("momentum_correction") and not has_own_momentum else []
            own += ["--dense-values", "fp16"] if variant.has("dense_values") else []
        common = ["--data", args.data, "--model", args.model, "--epochs", str(args.epochs)]
        return (*args.train, *common, *own, *variant.options)

    def execute(self, kind: str, name: str, arguments: tuple[str, ...]) -> Result:
        """A run's result, from its file if it is there; ``Failed`` as it comes."""
        run = Run(self.args.out / f"{kind}.jsonl" / name, self.args.ranks, arguments)
        result = run.result()
        if result is None:
            print(f"compare.py: {run.name}", file=sys.stderr, flush=True)
            result = run.execute(self.args.timeout)
        return result

    def share(self, variant: Variant, density: float) -> float:
        """What the variant sends at this density, as a share of the dense bytes."""
        # At its final density: a warm-up is not part of the budget.
        steady = ("--warmup-steps", "0") if variant.has("warmup_steps") else ()
        arguments = (*self.arguments(variant, self.args.seeds[0]), *steady, "--density", f"{density:.6g}")
        period = Run(self.args.out, self.args.ranks, arguments).configuration()["local_steps"] or 1
        steps = max(PROBE_STEPS, PROBE_PERIODS * period)
        arguments = (*arguments, "--max-steps", str(steps), "--eval-every", "1000000")
        result = self.execute("probes", f"{variant.label}-{density:.6g}", arguments)
        return float(result["wire_bytes_per_step"] / result["dense_bytes_per_step"])

    def decide(self) -> Decisions:
        """Every variant's density at every budget. A variant whose probes fail is left out, and the failure kept."""
        decisions: Decisions = {}
        for variant in self.args.variants:
            decided: dict[str, Point | str] = {}
            try:
                for text in self.args.budgets:
                    try:
                        if not variant.has("density"):
                            raise Unreachable("it has no density")
                        decided[text] = find(lambda density, v=variant: self.share(v, density), float(Fraction(text)))
                    except Unreachable as reason:
                        decided[text] = str(reason)
                decisions[variant.label] = decided
            except Failed as error:
                self._fail(str(error))
        return decisions

    def rows(self, decisions: Decisions) -> list[Row]:
        """What is trained: a variant once at each budget that it reaches, and once at its own ratio if it reaches
        none."""
        rows = []
        for variant in [variant for variant in self.args.variants if variant.label in decisions]:
            points = {t: point for t, point in decisions[variant.label].items() if not isinstance(point, str)}
            found = [
                Row(variant, f"{variant.label}-{t.replace('/', 'of')}", ("--density", f"{density:.6g}"))
                for t, (density, _) in points.items()
            ]
            rows += found or [Row(variant, variant.label, ())]
        return rows

    def train(self, decisions: Decisions) -> tuple[list[Result], list[Result]]:
        """The results at each row's best learning rate, seed by seed; and those of the first seed at all rates."""
        rows, (first, *others) = self.rows(decisions), self.args.seeds
        trials = {row: self.args.rates[row.variant.label] for row in rows}
        tried = self._train([(row, rate, first) for row in rows for rate in trials[row]])
        best = {}
        for row in rows:
            found = [(rate, tried[row, rate, first]) for rate in trials[row] if (row, rate, first) in tried]
            if found:
                metric = metric_of(found[0][1])
                best[row] = found[metric.best([result[metric.key] for _, result in found])][0]
        again = self._train([(row, rate, seed) for seed in others for row, rate in best.items()])
        chosen = [result for run, result in {**tried, **again}.items() if best[run[0]] == run[1]]
        return chosen, list(tried.values())

    def _train(self, runs: list[tuple[Row, str, int]]) -> dict[tuple[Row, str, int], Result]:
        """The results of those runs that have one."""
        results = {}
        for row, rate, seed in runs:
            name = "-".join([row.name, *([rate] if rate else []), str(seed)])
            given = (*self.arguments(row.variant, seed), *row.density, *(("--lr", rate) if rate else ()))
            try:
                result = self.execute("runs", name, given)
            except Failed as error:
                self._fail(str(error))
                continue
            if wrong := complaint(result):
                self._fail(f"{name}: {wrong}")
            if result[metric_of(result).key] is not None:  # otherwise it diverged before its first test
                results[row, rate, seed] = result
        return results

    def _fail(self, text: str) -> None:
        self.failures.append(text)
        print(f"compare.py: {text}", file=sys.stderr, flush=True)

    def page(self, results: list[Result], tried: list[Result], decisions: Decisions) -> str:
        args, seeds = self.args, ", ".join(map(str, self.args.seeds))
        parts = [
            f"# {args.model} on {args.data}, {args.ranks} ranks, {args.epochs} epochs, seeds {seeds}",
            f"Mean over the seeds, ± half the range. All ranks shared {os.cpu_count()} cores: step times compare "
            "only among runs of one call. Written by `scripts/experiments/compare.py`.",
            table.table(results),
            *([f"Learning rates, seed {args.seeds[0]}:", table.table(tried)] if args.lrs else []),
            *([budget_text(decisions)] if args.budgets else []),
            *(f"Failed:\n\n```\n{text}\n```" for text in self.failures),
        ]
        return "\n\n".join(parts)


def budget_text(decisions: Decisions) -> str:
    """Each variant's density at each budget, and why it has none."""
    rows, reasons = [], []
    for label, decided in decisions.items():
        for text, point in decided.items():
            if isinstance(point, str):
                reasons.append(f"- {label} at {text}: {point}")
                continue
            off = 100 * (point[1] / float(Fraction(text)) - 1)
            measured = f"1/{1 / point[1]:.2f} ({off:+.1f} %)"
            rows.append({"method": label, "budget": text, "density": f"{point[0]:g}", "measured": measured})
    intro = (
        "Budgets are shares of the bytes that a ring allreduce of float32 would send, everything included, measured in "
        "short runs. A method that reaches no budget runs at its own ratio."
    )
    return "\n\n".join([intro, *([table.markdown(rows)] if rows else []), *(["\n".join(reasons)] if reasons else [])])


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    compare = Comparison(args)
    for variant in args.variants:  # options that train.py refuses end it here
        Run(args.out, args.ranks, compare.arguments(variant, 0)).configuration()
    try:
        decisions = compare.decide()
        results, tried = compare.train(decisions)
    except OtherConfiguration as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 2
    if results:
        (args.out / "table.md").write_text(compare.page(results, tried, decisions) + "\n")
        print((args.out / "table.md").read_text())
    return 1 if compare.failures else 0


if __name__ == "__main__":
    with exit_on_signals():
        sys.exit(main(sys.argv[1:]))
