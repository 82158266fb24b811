#!/usr/bin/env python3
"""Compare methods: the same data, model, epochs, seeds and, if asked for, the same bytes; tables and plots.

    compare.py --list
    compare.py --methods none,fp16,iwp,topk --seeds 0,1,2 --ranks 4 --out results/compare-digits \\
        --data digits --model cnn --epochs 12 --budgets 1/64,1/16 --momentum-correction -- --batch-size 16 --lr 0.1

What follows -- goes to train.py in every run. A method may run in several variants, METHOD@NAME, each with options of
its own: `--methods iwp,iwp@one --option 'iwp@one:--leaders 1'`.

A call that was interrupted goes on where it stopped: a run whose result lies in OUT/runs is not repeated. OUT also gets
table.md, table.csv, accuracy.png, loss.png, time.md, time.png and, with --budgets, densities.json.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import table
from experiment import budgets, compressors, timing
from experiment.cli import end_by_exception, split, texts
from experiment.comparison import Decision, Densities, Variant, arguments, runs, variants
from experiment.data import DATASETS
from experiment.models import MODELS
from experiment.runs import Failed, OtherConfiguration, Result, Run, complaint
from tqdm import tqdm  # type: ignore[import-untyped]

Decisions = dict[str, dict[str, Decision]]


class NotNow(Exception):
    """A dry run would have to measure."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    own, train = split(argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--list", action="store_true", help="every method and its paper, and nothing else")
    parser.add_argument("--methods", type=_distinct, default=list(compressors.METHODS), help="by default all")
    parser.add_argument("--option", action="append", default=[], metavar="METHOD:OPTIONS", help="for one method only")
    parser.add_argument("--momentum-correction", action="store_true", help="and --dense-values fp16, where they exist")
    parser.add_argument("--budgets", type=_distinct, default=[], help="shares of the dense bytes, as 1/64,1/16")
    parser.add_argument("--data", choices=DATASETS, default="digits")
    parser.add_argument("--model", choices=MODELS, default="cnn")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seeds", type=lambda text: list(map(int, text.split(","))), default=[0])
    parser.add_argument("--out", type=Path, default=Path("results/compare"))
    parser.add_argument("--bandwidths", type=_distinct, default=["100mbit", "1gbit", "10gbit"])
    parser.add_argument("--target-accuracy", type=float, help="by default the least of the methods' final ones - 0.01")
    parser.add_argument("--timeout", type=float, default=3600, metavar="SECONDS", help="after which a run is killed")
    parser.add_argument("--dry-run", action="store_true", help="print the commands that are left to run")
    args = parser.parse_args(own)
    args.train = train
    try:
        args.variants = variants(args.methods, args.option)
        for text in args.budgets:
            budgets.fraction(text)
        for text in args.bandwidths:
            timing.bandwidth(text)
    except ValueError as error:
        parser.error(str(error))
    if fixed := [option for option in args.option if args.budgets and "--density" in option]:
        parser.error(f"--option {fixed[0]!r}: with --budgets the density is what is looked for")
    if moving := [option for option in args.option if args.budgets and "--diminishing" in option]:
        parser.error(f"--option {moving[0]!r}: a short run does not show what a density that moves will cost")
    return args


def _distinct(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in texts(text)))


def listing() -> str:
    """Every method: what it sends, and where it was published."""
    width = max(map(len, compressors.METHODS))
    lines = [
        f"{name:{width}}  {method.summary}\n{'':{width}}  {method.paper}"
        for name, method in compressors.METHODS.items()
    ]
    return "\n".join(lines)


class Comparison:
    """Runs what is left to run, and writes the report."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.failures: list[str] = []
        self.bar: tqdm | None = None

    def execute(self, run: Run) -> Result:
        """The run's result, from its file if it is there; ``Failed`` as it comes."""
        result = run.result()
        if result is None:
            if self.bar is not None:
                self.bar.set_description(run.name)
            result = run.execute(self.args.timeout)
        return result

    def decide(self) -> Decisions:
        """Every variant's density at every budget. A variant whose probes fail is left out, and the failure kept."""
        decisions: Decisions = {}
        densities = Densities(self.args, self.execute)
        for variant in self._progress(self.args.variants if self.args.budgets else [], "densities"):
            try:
                decisions[variant.label] = densities.decide(variant)
            except Failed as error:
                self._fail(str(error))
        return decisions

    def train(self, planned: Sequence[Run]) -> list[Result]:
        """The results of the runs that have one."""
        results = []
        for run in self._progress(planned, "runs"):
            try:
                result = self.execute(run)
            except Failed as error:
                self._fail(str(error))
                continue
            if wrong := complaint(result):
                self._fail(f"{run.name}: {wrong}")
            if result["test_accuracy"] is not None:  # or it diverged before its first test
                results.append(result)
        return results

    def alone(self) -> Run:
        """One rank, which exchanges nothing: its step is what computing takes."""
        args = self.args
        common = ("--data", args.data, "--model", args.model, "--epochs", str(args.epochs), "--seed", "0")
        return Run(args.out / "alone.json", 1, (*args.train, *common, "--max-steps", "60", "--eval-every", "1000000"))

    def _progress(self, things: Sequence, what: str) -> tqdm:  # type: ignore[type-arg]
        self.bar = tqdm(things, desc=what, disable=not things)
        return self.bar

    def _fail(self, text: str) -> None:
        self.failures.append(text)
        tqdm.write(f"compare.py: {text}", file=sys.stderr)

    def report(self, results: list[Result], decisions: Decisions) -> None:
        out = self.args.out
        (out / "table.md").write_text(self.page(results, decisions))
        table.write_csv(results, out / "table.csv")
        table.plot(results, out / "accuracy.png")
        table.plot_loss(results, out / "loss.png")

    def report_times(self, results: list[Result], alone: Result) -> None:
        args, out = self.args, self.args.out
        given, compute = args.target_accuracy is not None, alone["step_ms_median"]
        target = args.target_accuracy if given else timing.default_target(results)
        text = timing.report(results, compute, args.bandwidths, target, given, os.cpu_count())
        (out / "time.md").write_text(f"# Time to accuracy: {self.subject()}\n\n{text}\n![time](time.png)\n")
        timing.plot(results, compute, args.bandwidths, target, out / "time.png")

    def subject(self) -> str:
        args = self.args
        return f"{args.model} on {args.data}, {args.ranks} ranks, {args.epochs} epochs"

    def page(self, results: list[Result], decisions: Decisions) -> str:
        args = self.args
        parts = [
            f"# {self.subject()}, seeds {', '.join(map(str, args.seeds))}",
            f"Mean over the seeds, ± half the range. All ranks shared {os.cpu_count()} cores: step times compare "
            "only among runs of one call. `scripts/compare.py` wrote this; all options are in [table.csv](table.csv).",
            table.table(results),
        ]
        if args.budgets:
            parts += ["## Budgets", budget_text(args.variants, decisions)]
        if len(commits := sorted({str(result["config"].get("git_commit")) for result in results})) > 1:
            parts.append(f"These runs were made by {len(commits)} versions of the code: {', '.join(commits)}.")
        if self.failures:
            parts += ["## Failed", *(f"```\n{text}\n```" for text in self.failures)]
        plots = "![accuracy against wire bytes](accuracy.png)\n![loss against step](loss.png)"
        return "\n\n".join([*parts, plots, "Times to an accuracy: [time.md](time.md)."]) + "\n"


def budget_text(chosen: Sequence[Variant], decisions: Decisions) -> str:
    """What each variant's density is at each budget; what reaches no budget is named."""
    rows = []
    own = []
    for variant in chosen:
        decided = decisions.get(variant.label, {})
        for text, decision in decided.items():
            if decision.density is not None and decision.share is not None:
                off = 100 * (decision.share / budgets.fraction(text) - 1)
                measured = f"1/{1 / decision.share:.2f} ({off:+.1f} %)"
                rows.append((variant.label, text, f"{decision.density:g}", measured))
        reasons = {decision.why: None for decision in decided.values() if decision.why}
        why = "; ".join(
            f"{reason} at {', '.join(text for text, decision in decided.items() if decision.why == reason)}"
            for reason in reasons
        )
        none = all(decision.density is None for decision in decided.values())
        if why:
            own.append(f"- {variant.label} {'runs at its own ratio' if none else 'does not run everywhere'} ({why})")
    intro = "Shares of the bytes that the ring would send dense in float32, everything included."
    header = ("method", "budget", "density", "measured in short runs")
    found = [table.markdown(header, rows)] if rows else []
    return "\n\n".join([intro, *found, "\n".join(own)]).rstrip()


def dry(comparison: Comparison) -> None:
    """Prints what is left to do: probes first, whose results decide on densities, then runs."""
    args = comparison.args
    probes: list[Run] = []

    def note(run: Run) -> Result:
        probes.append(run)
        raise NotNow

    decisions: Decisions = {}
    for variant in args.variants if args.budgets else []:
        try:
            decisions[variant.label] = Densities(args, note).decide(variant)
        except NotNow:
            print(f"# {variant.label}: short runs will find its densities, and its runs follow; the first of them:")
            print(shlex.join(probes[-1].command()))
    for run in [comparison.alone(), *runs(args, args.variants, decisions)]:
        if run.result() is None:
            print(shlex.join(run.command()))


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    if args.list:
        print(listing())
        return 0
    comparison = Comparison(args)
    for variant in args.variants:  # options that train.py refuses end it here
        Run(args.out, args.ranks, arguments(args, variant, 0)).configuration()
    try:
        if args.dry_run:
            dry(comparison)
            return 0
        decisions = comparison.decide()
        planned = runs(args, args.variants, decisions)
        for run in planned:
            run.result()  # an error of another configuration comes before hours of work, not after
        alone = comparison.train([comparison.alone()])
        results = comparison.train(planned)
    except OtherConfiguration as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 2
    if results:
        comparison.report(results, decisions)
        print((args.out / "table.md").read_text())
    if results and alone:
        comparison.report_times(results, alone[0])
        print((args.out / "time.md").read_text())
    return 1 if comparison.failures else 0


if __name__ == "__main__":
    end_by_exception()
    sys.exit(main(sys.argv[1:]))
