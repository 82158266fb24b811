#!/usr/bin/env python3
"""Whether `hvd-compress estimate` predicts what `hvd-compress bench` measures, on the hosts of a netlab.

    check_estimate.py --models resnet50,gpt2 --hosts 4 --rates 100mbit,1gbit,10gbit,none --json FILE.jsonl/NAME

Run it as root on an otherwise idle machine: all hosts share its cores, and so the estimate is made with
--hosts-share-cores. Computation and Gloo are measured once for each model, before its first rate. Both leave out
forward; backward and update are as measured. Exit status 1 unless at every rate the method that was estimated to be the
fastest is the measured one, or within 10 % of it, and every step is within --allowed. The last column compares the
processor's time of a rank, which other programs disturb little: it says whether a wrong step is the model's or theirs.
"""

import os
import shlex
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experiments"))

import table
from experiment import netlab
from experiment.comparison import texts
from experiment.files import plain, script_parser
from experiment.metrics import environment
from experiment.result_file import run_path, write_run
from experiment.runs import exit_on_signals

from hvd_compress.cli import bench, estimate, network, shapes, transport
from hvd_compress.cli.kernels import Kernels
from hvd_compress.cli.wire import METHODS

METHODS_MEASURED = ["dense", "fp16", "IWP", "DeMo", "FFT", "TopK", "QSGD"]
#: Winners that differ by less are equal.
TIE = 0.1


def compare(
    model: str,
    rate: str,
    measured: tuple[dict[str, Any], list[bench.Row]],
    found: list[estimate.Estimate],
    processor: dict[str, float],
) -> list[dict[str, Any]]:
    """A row per method, with ``error``, estimated over measured minus 1, the estimated ``winner``, and whether it is
    ``right``. ``processor``: estimated ms of a rank's processor in a step, beyond backward and update."""
    steps = {row["method"]: row["step_ms"] for row in measured[1]}
    guessed = {one.method: 1e3 * one.step for one in found if one.method in steps}
    best = min(guessed, key=lambda name: guessed[name])
    right = steps[best] <= (1 + TIE) * min(steps.values())
    return [
        {"model": model, "rate": rate, "method": name, "measured_ms": ms, "estimated_ms": guessed[name],
         "error": guessed[name] / ms - 1, "winner": best, "right": right,
         "processor_error": (measured[0]["alone_processor_ms"] + processor[name]) / row["processor_ms"] - 1,
         "processor_ms": row["processor_ms"], **measured[0]}
        for row in measured[1] for name, ms in [(row["method"], row["step_ms"])]
    ]  # fmt: skip


def main(argv: list[str]) -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--models", type=texts, default=["resnet50", "gpt2"])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rates", type=texts, default=["none", "10gbit", "1gbit", "100mbit"])
    parser.add_argument("--methods", type=lambda text: text.split(";"), default=METHODS_MEASURED, help="joined by ;")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--allowed", type=float, default=0.3, help="error of a step time")
    parser.add_argument("--timeout", type=float, default=1800, metavar="SECONDS", help="of a rate")
    parser.add_argument("--json", type=run_path, metavar="FILE.jsonl/NAME")
    args = parser.parse_args(argv)
    if unknown := set(args.methods) - set(METHODS):
        parser.error(f"unknown methods: {', '.join(sorted(unknown))}; known: {'; '.join(METHODS)}")
    cores = len(os.sched_getaffinity(0))
    rows: list[dict[str, Any]] = []
    for model in args.models:
        sizes = [shape for _, shape in shapes.named(model)]
        gloo, kernels = transport.measure(), Kernels(sizes, min(cores, args.hosts))
        seconds = {method: kernels.seconds(method, args.hosts) for method in args.methods}
        for rate in args.rates:
            with netlab.up(args.hosts, rate, "ddp") as start:
                launcher = shlex.join(start)
                measured = bench.measure(
                    model, args.methods, args.hosts, launcher, "ddp", steps=args.steps, timeout=args.timeout
                )
            on = network.Network(args.hosts, network.bandwidth(rate), 0.0, gloo, cores)
            known = estimate.Model(sizes, measured[0]["alone_ms"] / 1e3)
            processor = {
                method: 1e3 * (seconds[method] + on.processor(known.messages(method, args.hosts)) / on.ranks_per_core)
                for method in args.methods
            }
            rows += compare(model, rate, measured, estimate.estimates(known, on, seconds, "sgd"), processor)
            shown = [row for row in rows if row["rate"] == rate and row["model"] == model]
            text = {key: lambda value: f"{value:,.1f}" for key in ("measured_ms", "estimated_ms")}
            text |= {key: lambda value: f"{value:+.0%}" for key in ("error", "processor_error")}
            keys = ("rate", "method", "measured_ms", "estimated_ms", "error", "winner", "processor_error")
            print(f"{model}, backward and update alone {measured[0]['alone_ms']:.1f} ms\n")
            print(table.markdown([{key: text.get(key, str)(row[key]) for key in keys} for row in shown], left=2))
            print(flush=True)
            write_run(args.json, {"config": {**plain(vars(args)), **environment()}, "rows": rows})
    wrong = [row for row in rows if abs(row["error"]) > args.allowed or not row["right"]]
    print(f"{len(rows) - len(wrong)} of {len(rows)} rows are within {args.allowed:.0%}, with the right winner")
    return 1 if wrong else 0


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main(sys.argv[1:]))
