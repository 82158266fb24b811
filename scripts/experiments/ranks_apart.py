#!/usr/bin/env python3
"""Take the loss of many ranks' local steps apart: is it the period, the bits, or that each rank normalises its own
noisy gradient, and of which parameters?

    ranks_apart.py                                    a table of docs/results/ranks-apart/tables.md, of stored runs
    ranks_apart.py --tables rates transfer ranks      its other tables
    ranks_apart.py --train [--tables ...]             simulates what is not stored
    ranks_apart.py --plan --device cuda --tables ...  how much that is
    ranks_apart.py --write-text DIR                   the text of this Python, for --data-dir on another machine

Simulations (:mod:`simulation`) of the GPT of docs/choosing.md (1,500 steps of 32 windows) by Muon for the hidden
matrices and by the sign of the momentum for the others (embedding, positions, norms), and of nanoGPT's training on
Shakespeare (2,000 steps of 12 windows). On one CPU core a row takes about ten minutes. Several processes share a GPU
with --share 0/4, 1/4, ...
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from experiment.files import script_parser
from experiment.metrics import git_commit
from experiment.text import SHAKESPEARE, STORED_LIBRARY, store_library
from simulation.setting import TASKS, Setting
from simulation.tables import TABLES, Runs
from simulation.training import simulate

FILE = Path(__file__).resolve().parents[2] / "docs" / "results" / "ranks-apart" / "runs.jsonl"


def batched(settings: Sequence[Setting], together: int) -> list[list[Setting]]:
    """Settings that differ only in rate and seed, of at most ``together`` ranks in all, but at least one."""
    alike: dict[Setting, list[Setting]] = {}
    for setting in dict.fromkeys(settings):
        alike.setdefault(replace(setting, rate=0.0, seed=0), []).append(setting)
    batches = []
    for kind, group in alike.items():
        count = -(-len(group) // max(1, together // kind.ranks))
        batches += [group[len(group) * i // count : len(group) * (i + 1) // count] for i in range(count)]
    return batches


def read(file: Path) -> Runs:
    lines = map(json.loads, file.read_text().splitlines() if file.exists() else ())
    return {(s := Setting(**line["setting"])): line[TASKS[s.task].metric] for line in lines}


def store(file: Path, setting: Setting, loss: float, **facts: str | float) -> None:
    """Appends a line, with the commit and facts of the machine; processes may write to one file."""
    facts |= {"git_commit": git_commit() or ""}
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as opened:
        opened.write(json.dumps({"setting": asdict(setting), TASKS[setting.task].metric: loss, **facts}) + "\n")


def train(batches: list[list[Setting]], args: argparse.Namespace) -> None:
    for number, batch in enumerate(batches, 1):
        start = time.perf_counter()
        losses = simulate(batch, torch.device(args.device), args.data_dir)
        for setting, loss in zip(batch, losses, strict=True):
            store(args.results, setting, loss)
        seconds = time.perf_counter() - start
        print(f"batch {number} of {len(batches)}: {len(batch)} runs, {seconds:.0f} s: {batch[0]}", file=sys.stderr)


def share(text: str) -> tuple[int, int]:
    index, count = map(int, text.split("/"))
    if not 0 <= index < count:
        raise ValueError(f"got {text}")
    return index, count


def main() -> None:
    parser: argparse.ArgumentParser = script_parser(__doc__)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=["apart"], help="(default: apart)")
    parser.add_argument("--train", action="store_true", help="simulate what is not stored, in place of a table")
    parser.add_argument("--plan", action="store_true", help="count runs and batches, in place of a table")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--together", type=int, help="most ranks of a batch (default: a run; 192 with cuda)")
    parser.add_argument("--share", type=share, default=(0, 1), help="I/N: of the batches, every Nth from the Ith on")
    parser.add_argument("--results", type=Path, default=FILE, help="stored runs (default: those of docs/)")
    parser.add_argument("--data-dir", type=Path, help=f"folder that holds {STORED_LIBRARY} and {SHAKESPEARE}")
    parser.add_argument("--write-text", type=Path, metavar="DIR", help=f"write {STORED_LIBRARY} and end")
    args = parser.parse_args()
    if args.write_text:
        return print(store_library(args.write_text))
    torch.set_num_threads(1)
    stored = read(args.results)
    together = args.together or (192 if args.device == "cuda" else 1)
    chosen = [name for name in TABLES if name in args.tables]
    # Shares are of all runs: those of processes that begin later are the same. A table's runs come before the next's.
    shared, planned = [], set[Setting]()
    for name in chosen:
        shared += batched([setting for setting in TABLES[name].settings if setting not in planned], together)
        planned.update(TABLES[name].settings)
    index, count = args.share
    batches = [missing for batch in shared[index::count] if (missing := [s for s in batch if s not in stored])]
    if args.plan:
        print(f"{sum(map(len, batches))} runs in {len(batches)} batches")
        for batch in batches:
            print(f"{len(batch)} runs, {len(batch) * batch[0].ranks} ranks: {batch[0]}")
    elif args.train:
        train(batches, args)
    else:
        import table  # here, since it needs more than torch and numpy

        print("\n\n".join(table.markdown(TABLES[name].rows(stored), left=1) for name in chosen))


if __name__ == "__main__":
    main()
