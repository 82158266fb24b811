#!/usr/bin/env python3
"""Seconds to a loss with README's program, by link: the GPT of docs/choosing.md, dense, fp16 and low_bit. (root)

    seconds_to_loss.py                  the table of the stored runs
    seconds_to_loss.py --measure        measures the steps that are not stored

A link changes how long a step takes, and not what it learns. So the steps to a loss are those of the trainings of
`measure.sh gpt-recipe` (seed 0, each at its best learning rate, tested every 100 steps, interpolated; with fp16 as
dense), and ms a step are measured: the same training for --steps steps by torch DDP on four hosts of netlab.sh. These
share the machine's cores and compute about ten times slower than a card, so the network is slowed down ten times, too:
ten times lower rates and ten times longer delays. Seconds are on that scale.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import race
import table
from experiment import netlab
from experiment.files import script_parser
from experiment.result_file import read_runs
from experiment.runs import Result, Run

from hvd_compress.cli.processes import exit_on_signals

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
HOSTS = 4
#: Bits per byte: what dense AdamW reaches at its best, and a loss close to the end of these trainings.
TARGETS = (2.1, 1.9)
#: Of the slowed lab, by the link that it stands for: rate, and delay one way.
LINKS = {
    "100 Mbit/s": ("10mbit", None),
    "1 Gbit/s": ("100mbit", None),
    "1 Gbit/s, round trip 50 ms": ("100mbit", "250ms"),
}
LOCAL = ("--local-steps", "3", "--bits", "2", "--dense-values", "fp16", "--unsent", "buffer", "--restore-length")
#: By name: the row of gpt-recipe that it learns as, the method, and its options.
EXCHANGES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "dense": ("none@muon-adamw", "none", ()),
    "fp16": ("none@muon-adamw", "fp16", ()),
    "low_bit": ("quantized@recipe", "quantized", LOCAL),
}


def curve(row: str) -> Result:
    """The training of a row whose loss was best at the end, of seed 0. ``ValueError`` if none is stored."""
    runs = read_runs(RESULTS / "gpt-recipe" / "runs.jsonl")
    found = [run for name, run in runs.items() if name.startswith(f"{row}-") and run["config"]["seed"] == 0]
    if not found:
        raise ValueError(f"gpt-recipe has no runs of {row}")
    return min(found, key=lambda run: float(run["test_bits_per_byte"]))


def name_of(link: str, exchange: str) -> str:
    return "-".join([*filter(None, LINKS[link]), exchange])


def of(link: str, exchange: str, args: argparse.Namespace) -> Run:
    _, method, options = EXCHANGES[exchange]
    training = ("--data", "text", "--model", "gpt", "--epochs", "15", "--batch-size", "8", "--optimizer", "muon-adamw")
    arguments = (*training, "--max-steps", str(args.steps), "--host", "ddp", "--compression", method, *options)
    return Run(args.out / "runs.jsonl" / name_of(link, exchange), HOSTS, arguments)


def measure(args: argparse.Namespace) -> None:
    """Trains on the hosts of each link what is not stored. ``NoLab`` or ``Failed`` say why not."""
    for link, (rate, delay) in LINKS.items():
        for exchange in EXCHANGES:
            run = of(link, exchange, args)
            if run.result() is None:
                with netlab.up(HOSTS, rate, "ddp", delay=delay) as launcher:
                    Run(run.path, HOSTS, run.arguments, launcher).execute(args.timeout)


def rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    found, learned = read_runs(args.out / "runs.jsonl"), {name: curve(row) for name, (row, *_) in EXCHANGES.items()}
    lines = []
    for link in LINKS:
        for exchange, trained in learned.items():
            seconds = float(found[name_of(link, exchange)]["step_ms_median"]) / 1000
            line = {"links": link, "exchange": exchange, "ms a step": f"{1000 * seconds:,.0f}"}
            for target in TARGETS:
                there = race.reached(trained, target)
                line[f"seconds to {target:g}"] = f"{there[0] * seconds:,.0f}" if there else "-"
            lines.append(line)
    return lines


def main() -> None:
    parser: argparse.ArgumentParser = script_parser(__doc__)
    parser.add_argument("--measure", action="store_true", help="measure steps, in place of a table")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--out", type=Path, default=RESULTS / "gpt-links")
    parser.add_argument("--timeout", type=float, default=900, metavar="SECONDS", help="after which a run is killed")
    args = parser.parse_args()
    if args.measure:
        measure(args)
    print(table.markdown(rows(args), left=2))


if __name__ == "__main__":
    with exit_on_signals():
        sys.exit(main())
