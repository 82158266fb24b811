#!/usr/bin/env python3
"""Compare methods with the same data, model, epochs and seeds and, if asked for, the same bytes; tables and plots.

    compare.py --list
    compare.py --methods none,fp16,iwp,topk --seeds 0,1,2 --ranks 4 --out results/compare-digits \\
        --data digits --model cnn --epochs 12 --budgets 1/64,1/16 --momentum-correction -- --batch-size 16 --lr 0.1

The arguments after -- go to train.py in every run. A method may run in several variants, METHOD@NAME, each with options
of its own: `--methods iwp,iwp@one --option 'iwp@one:--leaders 1'`; ddp-METHOD runs on torch DDP.

An interrupted call can be repeated: a run whose result lies in OUT/runs is not run again. OUT also gets table.md,
table.csv, accuracy.png, loss.png and, with --budgets, densities.json.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import table
from experiment import comparison, compressors
from experiment.comparison import Decision, Densities
from experiment.data import DATASETS
from experiment.models import MODELS
from experiment.runs import Failed, OtherConfiguration, Result, Run, complaint, exit_on_signals

Decisions = dict[str, dict[str, Decision]]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    own, train = comparison.split(argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--list", action="store_true", help="print every method and its paper, and nothing else")
    horovod = [name for name, method in compressors.METHODS.items() if "horovod" in method.hosts]
    comparison.add_arguments(parser, horovod)
    parser.add_argument("--momentum-correction", action="store_true", help="and --dense-values fp16, where they exist")
    parser.add_argument("--budgets", type=comparison.texts, default=[], help="shares of the dense bytes, as 1/64,1/16")
    parser.add_argument("--data", choices=DATASETS, default="digits")
    parser.add_argument("--model", choices=MODELS, default="cnn")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seeds", type=lambda text: list(map(int, text.split(","))), default=[0])
    parser.add_argument("--out", type=Path, default=Path("results/compare"))
    parser.add_argument("--timeout", type=float, default=3600, metavar="SECONDS", help="after which a run is killed")
    args = parser.parse_args(own)
    args.train = train
    try:
        args.variants = comparison.variants(args.methods, args.option)
        for text in args.budgets:
            comparison.budget(text)
    except ValueError as error:
        parser.error(str(error))
    if fixed := [option for option in args.option if args.budgets and "--density" in option]:
        parser.error(f"--option {fixed[0]!r}: with --budgets, the density is determined by the budget")
    return args


class Comparison:
    """Runs what is left to run, and writes the report."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.failures: list[str] = []

    def execute(self, run: Run) -> Result:
        """The run's result, from its file if it is there; ``Failed`` as it comes."""
        result = run.result()
        if result is None:
            print(f"compare.py: {run.name}", file=sys.stderr, flush=True)
            result = run.execute(self.args.timeout)
        return result

    def decide(self) -> Decisions:
        """Every variant's density at every budget. A variant whose probes fail is left out, and the failure kept."""
        decisions: Decisions = {}
        densities = Densities(self.args, self.execute)
        for variant in self.args.variants if self.args.budgets else []:
            try:
                decisions[variant.label] = densities.decide(variant)
            except Failed as error:
                self._fail(str(error))
        return decisions

    def train(self, planned: Sequence[Run]) -> list[Result]:
        """The results of the runs that have one."""
        results = []
        for run in planned:
            try:
                result = self.execute(run)
            except Failed as error:
                self._fail(str(error))
                continue
            if wrong := complaint(result):
                self._fail(f"{run.name}: {wrong}")
            if result["test_accuracy"] is not None:  # otherwise it diverged before its first test
                results.append(result)
        return results

    def _fail(self, text: str) -> None:
        self.failures.append(text)
        print(f"compare.py: {text}", file=sys.stderr, flush=True)

    def report(self, results: list[Result], decisions: Decisions) -> None:
        out = self.args.out
        (out / "table.md").write_text(self.page(results, decisions))
        table.write_csv(results, out / "table.csv")
        table.plot(results, out / "accuracy.png")
        table.plot_loss(results, out / "loss.png")

    def page(self, results: list[Result], decisions: Decisions) -> str:
        args = self.args
        parts = [
            f"# {args.model} on {args.data}, {args.ranks} ranks, {args.epochs} epochs, "
            f"seeds {', '.join(map(str, args.seeds))}",
            f"Mean over the seeds, ± half the range. All ranks shared {os.cpu_count()} cores: step times compare "
            "only among runs of one call. Written by `scripts/compare.py`; all options are in [table.csv](table.csv).",
            table.table(results),
        ]
        if args.budgets:
            parts += ["## Budgets", budget_text(decisions)]
        if len(commits := sorted({str(result["config"].get("git_commit")) for result in results})) > 1:
            parts.append(f"These runs were made by {len(commits)} versions of the code: {', '.join(commits)}.")
        if self.failures:
            parts += ["## Failed", *(f"```\n{text}\n```" for text in self.failures)]
        return (
            "\n\n".join([*parts, "![accuracy against wire bytes](accuracy.png)\n![loss against step](loss.png)"]) + "\n"
        )


def budget_text(decisions: Decisions) -> str:
    """Each variant's density at each budget, and why it has none."""
    rows, reasons = [], []
    for label, decided in decisions.items():
        for text, decision in decided.items():
            if decision.share is None:
                reasons.append(f"- {label} at {text}: {decision.why}")
                continue
            off = 100 * (decision.share / comparison.budget(text) - 1)
            measured = f"1/{1 / decision.share:.2f} ({off:+.1f} %)"
            rows.append({"method": label, "budget": text, "density": f"{decision.density:g}", "measured": measured})
    intro = (
        "Shares of the bytes that a ring allreduce of float32 would send, everything included, measured in short runs. "
        "A method that reaches no budget runs at its own ratio."
    )
    return "\n\n".join([intro, *([table.markdown(rows)] if rows else []), *(["\n".join(reasons)] if reasons else [])])


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    if args.list:
        for name, method in compressors.METHODS.items():
            print(f"{name:12}  {method.summary}\n{'':12}  {method.paper}")
        return 0
    compare = Comparison(args)
    for variant in args.variants:  # options that train.py refuses end it here
        Run(args.out, args.ranks, comparison.arguments(args, variant, 0)).configuration()
    try:
        decisions = compare.decide()
        planned = comparison.runs(args, decisions)
        for run in planned:
            run.result()  # raises before hours of work if a result has another configuration
        results = compare.train(planned)
    except OtherConfiguration as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 2
    if results:
        compare.report(results, decisions)
        print((args.out / "table.md").read_text())
    return 1 if compare.failures else 0


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main(sys.argv[1:]))
