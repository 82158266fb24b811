#!/usr/bin/env python3
"""Local steps in 2 bits, every third step, on many ranks: does the learning rate of a dense training fit them?

    many_ranks.py            the table in docs/local_steps.md, of stored runs
    many_ranks.py --train    first trains what is not stored, one run after the other, on one core

The GPT of docs/choosing.md, 1,500 steps of 32 windows, seed 0, ranks in one process. Each row is a learning rate:
bits per byte of dense training, and how much more plain averages and restored lengths have at the same rate.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import table
from experiment.files import script_parser
from experiment.quality import BITS_PER_BYTE
from experiment.result_file import Result, read_runs
from experiment.runs import Run

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
#: Where this script writes; the others have some of the runs.
OWN, OTHERS = RESULTS / "many-ranks" / "runs.jsonl", ("gpt-muon", "gpt-muon-ranks", "gpt-adamw")
RATES = {"muon": ("7.5e-4", "1.5e-3", "3e-3", "4.5e-3", "6e-3"), "adamw": ("1.5e-3", "3e-3", "6e-3")}
RANKS = {"muon": (4, 16), "adamw": (4,)}
LOCAL = "--local-steps 3 --unsent buffer --compression quantized --bits 2 --dense-values fp16"
#: Options that older runs did not have.
OLDER = {"local_steps": None, "optimizer": "sgd", "restore_length": False, "fragments": 1, "delay": 0}
KINDS = {"dense": "", "plain": LOCAL, "length": f"{LOCAL} --restore-length"}


def run_of(optimizer: str, kind: str, ranks: int, rate: str) -> Run:
    """Dense training is one rank's, with the batch of all."""
    name = f"{optimizer}-{kind}-{rate}-0" if kind == "dense" else f"{optimizer}-{kind}-{ranks}-{rate}-0"
    ranks = 1 if kind == "dense" else ranks
    given = f"--host threads --data text --model gpt --epochs 15 --eval-every 5 --optimizer {optimizer} --lr {rate}"
    return Run(OWN / name, ranks, (*given.split(), "--batch-size", str(32 // ranks), *KINDS[kind].split()))


def found(runs: list[Result], optimizer: str, kind: str, ranks: int, rate: str) -> Result | None:
    """The stored run of seed 0 with these settings, whatever its name. Dense training on several ranks is the same but
    for rounding."""
    local = kind != "dense"
    wanted: dict[str, Any] = {"optimizer": optimizer, "lr": float(rate), "seed": 0, "model": "gpt", "epochs": 15}
    if local:
        wanted |= {"compression": "quantized", "bits": 2, "local_steps": 3, "unsent": "buffer"}
        wanted |= {"restore_length": kind == "length", "fragments": 1, "delay": 0}
    else:
        wanted |= {"compression": "none", "local_steps": None}
    for run in runs:
        config = {**OLDER, **run["config"]}
        whole = run["ranks"] * config["batch_size"] == 32 and (not local or run["ranks"] == ranks)
        if whole and all(config.get(key) == value for key, value in wanted.items()):
            return run
    return None


def rows(runs: list[Result]) -> list[dict[str, str]]:
    """Of the table; a cell is "-" where there is no run."""

    def bits(*setting: Any) -> float | None:
        run = found(runs, *setting)
        return None if run is None else run[BITS_PER_BYTE.key]

    lines = []
    for optimizer, rates in RATES.items():
        for rate in rates:
            dense, line = bits(optimizer, "dense", 1, rate), {"optimizer": optimizer, "learning rate": rate}
            line["dense"] = "-" if dense is None else f"{dense:.3f}"
            for ranks in (4, 16):
                for kind, title in (("plain", "plain"), ("length", "restored")):
                    value = bits(optimizer, kind, ranks, rate)
                    over = "-" if value is None or dense is None else f"{value:.3f} ({value / dense - 1:+.1%})"
                    line[f"{title}, {ranks} ranks"] = over
            lines.append(line)
    return lines


def main() -> None:
    parser: argparse.ArgumentParser = script_parser(__doc__)
    parser.add_argument("--train", action="store_true", help="train what is not stored")
    parser.add_argument("--max-seconds", type=float, default=7200, help="of one training")
    args = parser.parse_args()
    files = [OWN, *(RESULTS / name / "runs.jsonl" for name in OTHERS)]
    runs = [run for file in files if file.exists() for run in read_runs(file).values()]
    for optimizer, rates in RATES.items() if args.train else ():
        for setting in ((optimizer, kind, ranks, r) for ranks in RANKS[optimizer] for kind in KINDS for r in rates):
            if found(runs, *setting) is None:
                print(*setting, file=sys.stderr)
                runs.append(run_of(*setting).execute(args.max_seconds))
    print(table.markdown(rows(runs), left=2))


if __name__ == "__main__":
    main()
