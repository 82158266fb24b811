#!/usr/bin/env python3
"""What every method and recipe holds in memory beside weights and gradients, in bytes a parameter.

    bench_memory.py --out docs/results/memory       all of them, 2 and 4 ranks, 4 and 25 M parameters
    bench_memory.py --out docs/results/memory --methods "low_bit;Quantized"       these again, among the others

"held" is between steps, or with local steps between exchanges, "peak" within one: resident memory, as bench_growth.py
and bench_round.py measure it, whose simulated ranks stand for the others. What these send is in the peak, as on real
ranks. "NAME, momentum" has the momentum in the compressor. All are as by default: `Quantized` with 4 bits,
`low_bit` with 2.
"""

import multiprocessing
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experiments"))

import bench_growth
import bench_round
import table
import torch
from experiment import metrics
from experiment.files import script_parser
from experiment.result_file import read_runs, write_run

import hvd_compress

RECIPES = "low_bit", "diloco", "sparseloco"
COMPRESSORS = (
    "Quantized", "DeMo", "IWP", "FFT", "MIPD", "SlimDP", "MP2", "PowerSGD", "TopK", "DGC", "QSGD", "TernGrad",
    "NoCompression",
)  # fmt: skip
MOMENTUM = ", momentum"
HEAD = """# Memory of a method

Bytes a parameter beside weights and gradients: held between steps, or with local steps between exchanges, and the peak
within one; what of it counts is in [methods](../../methods.md#all-methods). The simulation holds a sum beside what is
summed, as Horovod does; torch sums in place (`scripts/measure.sh memory`).

"""
#: Rows that can be measured: methods, and again with momentum those that can have it and do not by default.
KNOWN = (*RECIPES, *COMPRESSORS, *(name + MOMENTUM for name in ("IWP", "FFT", "MIPD", "SlimDP", "MP2", "TopK")))


def measured(names: Sequence[str], millions: Sequence[int], ranks: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Each in a process of its own: memory that an earlier measurement has freed could be reused."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([Path(__file__).stem])
    for name in names:
        for size in millions:
            for count in ranks:
                with ProcessPoolExecutor(1, context) as process:
                    yield process.submit(_measure, name, size, count).result()


def _measure(name: str, millions: int, ranks: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")  # that all simulated ranks have the same gradients
    options = {"momentum": 0.9} if name.endswith(MOMENTUM) else {}

    def rank(size: int) -> Any:
        if name in RECIPES:
            return bench_round.Rank(name, size, ranks)
        return bench_growth.Rank(getattr(hvd_compress, name.removesuffix(MOMENTUM)), size, ranks, **options)

    rank(1).step()  # loads all code
    large = rank(millions)
    found = bench_growth.costs(large, millions * 1_000_000, steps=2, before=2)
    held, peak = found["held_bytes_per_entry"], found["peak_bytes_per_entry"]
    return {"method": name, "millions": millions, "ranks": ranks, "held": held, "peak": peak}


def page(rows: Iterable[dict[str, Any]]) -> str:
    """The Markdown table of all rows, with its heading."""
    shown = dict[str, dict[str, str]]()
    for row in rows:
        cells = shown.setdefault(row["method"], {"method or recipe": row["method"]})
        cells[f"{row['millions']} M, {row['ranks']} ranks"] = f"{row['held']:.1f}, {row['peak']:.1f}"
    return f"{HEAD}{table.markdown(list(shown.values()))}\n"


def main() -> int:
    def names(text: str) -> list[str]:
        return text.split(";")

    def counts(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = script_parser(__doc__)
    parser.add_argument("--methods", type=names, default=KNOWN, help=f"by default all: {'; '.join(KNOWN)}")
    parser.add_argument("--millions", type=counts, default=[4, 25], help="of parameters")
    parser.add_argument("--ranks", type=counts, default=[2, 4])
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="of runs.jsonl and table.md")
    args = parser.parse_args()
    if unknown := set(args.methods) - set(KNOWN):
        parser.error(f"unknown: {'; '.join(sorted(unknown))}; known are {'; '.join(KNOWN)}")
    found = list[dict[str, Any]]()
    for name in args.methods:
        found += (rows := list(measured([name], args.millions, args.ranks)))
        if args.out:
            write_run(args.out / "runs.jsonl" / name, {"config": metrics.environment(), "rows": rows})
    print(page(found))
    if args.out:
        runs = read_runs(args.out / "runs.jsonl").values()
        (args.out / "table.md").write_text(page(row for run in runs for row in run["rows"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
