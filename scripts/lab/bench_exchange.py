#!/usr/bin/env python3
"""Time whole optimizer steps, method by method, on the shapes of a well-known network: Horovod and torch DDP.

    bench_exchange.py --hosts 4 --rate 100mbit,1gbit --backend mpi,gloo --methods none,iwp --json FILE.jsonl/NAME
    bench_exchange.py --hosts 4 --rate 1gbit --methods none,iwp,ddp-none,ddp-fp16,ddp-powersgd,ddp-iwp
    bench_exchange.py --hosts 4 --rate 1gbit --shapes gpt2 --pause-ms 350 --methods fp16,iwp@local \\
        --option 'iwp@local:--local-steps 8 --density 1 --values lloyd4'
    bench_exchange.py --ranks 2 --methods iwp,iwp@cycle --environment 'iwp@cycle:HOROVOD_CYCLE_TIME=0.2'
    bench_exchange.py --hosts 2 --ranks-per-node 2 --methods none,iwp,iwp@nodes --option iwp@nodes:--nodes=2

With --hosts, every rank, or --ranks-per-node of them, has a network namespace of its own, whose egress is shaped to
--rate (netlab.sh; root); they are made for each run and removed after it. With --ranks, all are on the loopback.
Methods are those of train.py, with its defaults except for --option, and its options of local steps. They run on the
unmodified Horovod optimizer, by MPI or Gloo (--backend), or, as ddp-METHOD, on DistributedDataParallel over Gloo:
ddp-none (no hook), ddp-fp16 (fp16_compress_hook), ddp-powersgd (torch's powerSGD_hook, rank 4, one bucket) and any
method of hvd_compress (ddp-iwp).

Figures are medians over the steps of all --runs, with the fastest and the slowest step in brackets.
  step                  backward, exchange and update, of the slowest rank
  alone                 backward and update; gradients are prepared, so it is short and little overlaps with it, unless
                        --pause-ms stands for a computation on a GPU
  longest               the longest step between two exchanges: of local steps, usually that of the exchange
  exchange              what a step takes beyond these
  compress              time in the compressor without waiting, by stats(), mean over ranks; 0 for torch's own hooks
  sent                  MB per host and step by the network interface's counter, with negotiation and the benchmark's
                        barrier (on the loopback: per rank, by stats())
  wire ratio            bytes of a float32 ring allreduce, 2 (N - 1) / N x 4 bytes an entry, over the bytes sent
  speed-up              of whole steps over the fastest row of none and of fp16 at that rate, by any backend
  break-even            the bandwidth below which the saved bytes are worth the compressor's time without any overlap
  wrong                 runs after which the weights differ between ranks
All ranks share this machine's cores: compare within one call only; compress is an upper bound, break-even a lower
one. Exit status 1 if a run failed or anything was wrong.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experiments"))

import table
from experiment import comparison, compressors, netlab
from experiment.comparison import Variant, texts
from experiment.files import plain, script_parser
from experiment.result_file import run_path, write_run
from experiment.runs import SCRIPTS, Failed, exit_on_signals, run_group

from hvd_compress.cli.network import bandwidth
from hvd_compress.cli.shapes import SHAPES
from hvd_compress.engine.collectives import ring_bytes

Row = dict[str, Any]
DDP = ["ddp-none", "ddp-fp16", "ddp-powersgd", "ddp-iwp"]
BASELINES = ("none", "fp16")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = script_parser(__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--hosts", type=int, metavar="N", help="ranks in network namespaces, one each")
    where.add_argument("--ranks", type=int, metavar="N", help="ranks on the loopback")
    parser.add_argument("--ranks-per-node", type=int, default=1, metavar="N", help="on each of --hosts")
    parser.add_argument("--rate", type=texts, default=["none"], help="of --hosts, as 100mbit; several as 1gbit,none")
    parser.add_argument("--shapes", choices=SHAPES, default="resnet50")
    horovod = [name for name, method in compressors.METHODS.items() if "horovod" in method.hosts]
    comparison.add_arguments(parser, [*horovod, *DDP])
    parser.add_argument("--environment", action="append", default=[], metavar="METHOD:NAME=VALUE", help="of its ranks")
    parser.add_argument("--backend", type=texts, default=["mpi"], help="of Horovod: mpi, gloo or mpi,gloo")
    parser.add_argument("--runs", type=int, default=1, help="of every method, in turn")
    parser.add_argument("--steps", type=int, default=7, help="measured in each run; of local steps, periods")
    parser.add_argument("--pause-ms", type=float, default=0.0, help="forward and backward on a GPU, which is a pause")
    parser.add_argument("--max-seconds", type=float, default=120, help="limit for the steps of a run, but at least 3")
    parser.add_argument("--timeout", type=float, default=900, metavar="SECONDS", help="after which a run is killed")
    parser.add_argument("--json", type=run_path, metavar="FILE.jsonl/NAME", help="write all rows here")
    args = parser.parse_args(argv)
    for name, least in (("hosts", 2), ("ranks", 2), ("ranks_per_node", 1), ("runs", 1), ("steps", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            parser.error(f"--{name} must be at least {least}, got {value}")
    try:
        args.rate.sort(key=bandwidth, reverse=True)
        args.variants = comparison.variants(args.methods, args.option)
        args.environments = comparison.environments(args.methods, args.environment)
    except ValueError as error:
        parser.error(str(error))
    if unknown := set(args.backend) - {"mpi", "gloo"}:
        parser.error(f"--backend must be of mpi and gloo, got {', '.join(sorted(unknown))}")
    if args.ranks and args.ranks_per_node > 1:
        parser.error("--ranks-per-node needs --hosts; on the loopback, --option METHOD:--nodes=N divides --ranks")
    if args.ranks and args.rate != ["none"]:
        parser.error("--rate needs --hosts: the loopback has none")
    return args


def runs(args: argparse.Namespace) -> Iterator[tuple[str, str, Variant]]:
    """Rate, backend and variant: a run of each, then the next of each. DDP's backend is always Gloo, and a variant that
    only has settings of Open MPI is not run by Gloo."""
    for rate, _ in itertools.product(args.rate, range(args.runs)):
        for backend, variant in itertools.product(args.backend, args.variants):
            names = args.environments[variant.label]
            if variant.host == "ddp":
                if backend == args.backend[-1]:
                    yield rate, "gloo", variant
            elif backend == "mpi" or not names or not all(name.startswith("OMPI_MCA_") for name in names):
                yield rate, backend, variant


def measure(args: argparse.Namespace, rate: str, backend: str, variant: Variant) -> dict[str, Any]:
    """What the ranks measured; ``Failed`` or ``NoLab`` if they did not."""
    launcher = "ddp" if variant.host == "ddp" else backend
    if args.hosts:
        place = netlab.up(args.hosts, rate, launcher, args.ranks_per_node)
    else:
        place = nullcontext(netlab.loopback(args.ranks, launcher))
    with tempfile.TemporaryDirectory(prefix="bench_exchange.") as folder, place as start:
        file = Path(folder) / "result.json"
        names = ("shapes", "steps", "pause_ms", "max_seconds", "timeout")
        options = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names]
        options += [f"--compression={variant.method}", f"--host={variant.host}", f"--result={file}"]
        options += [f"--expect={name}={value}" for name, value in args.environments[variant.label].items()]
        command = [*start, str(SCRIPTS / "lab" / "exchange_rank.py"), *options, *variant.options]
        name = f"{variant.label} by {backend} at {rate}"
        run_group(command, args.timeout, Path(folder) / "log", args.environments[variant.label], name)
        result: dict[str, Any] = json.loads(file.read_text())
        return result


def make_row(method: str, rate: str, backend: str, results: Sequence[dict[str, Any]]) -> Row:
    """Medians over the steps of all runs, and [least, largest]; ``step_ms_runs`` has each run's median."""
    ranks, median = results[0]["ranks"], statistics.median
    steps = [ms for result in results for ms in result["steps_ms"]]
    alone, compress = (median(result[key] for result in results) for key in ("alone_ms", "compress_ms"))
    dense = ring_bytes("allreduce", 4 * results[0]["entries"], ranks)
    sent = statistics.mean(result["sent_bytes"] for result in results)
    return {
        "method": method,
        "rate": rate,
        "backend": backend,
        "ranks": ranks,
        "steps": len(steps),
        "step_ms": median(steps),
        "step_ms_spread": [min(steps), max(steps)],
        "step_ms_runs": [median(result["steps_ms"]) for result in results],
        "longest_ms": median(result["longest_ms"] for result in results),
        "alone_ms": alone,
        "exchange_ms": median(steps) - alone,
        "compress_ms": compress,
        "dense_bytes": dense,
        "tx_bytes": sent,
        "wire_ratio": dense / sent,
        "break_even_gbit_s": break_even(dense - sent, compress),
        "settings": results[0]["environment"]["settings"],
        "wrong": sum(not result["replicas_equal"] for result in results),
    }


def break_even(saved: float, milliseconds: float) -> float | None:
    """The bandwidth in Gbit/s at which sending ``saved`` bytes takes so long; None where none are saved."""
    return 8e-6 * saved / milliseconds if milliseconds > 0 and saved > 0 else None


def compared(rows: Sequence[Row], failed: Collection[tuple[str, str]] = ()) -> list[Row]:
    """With ``speedup_over_none`` and ``speedup_over_fp16``, over the fastest row of that method at the same rate. None
    without such a row, or if a run (label, rate) of that method has ``failed``: it may have been the fastest."""

    def baseline(label: str) -> str:
        return label.partition("@")[0].removeprefix("ddp-")

    fastest: dict[tuple[str, str], float] = {}
    for one in rows:
        key = baseline(one["method"]), one["rate"]
        fastest[key] = min(one["step_ms"], fastest.get(key, math.inf))
    for label, rate in failed:
        fastest.pop((baseline(label), rate), None)
    return [
        {**one, **{f"speedup_over_{base}": best and best / one["step_ms"]
                   for base in BASELINES for best in [fastest.get((base, one["rate"]))]}}
        for one in rows
    ]  # fmt: skip


def markdown(rows: Sequence[Row]) -> str:
    """Two tables of the same rows: the step and its bytes; its parts."""

    def text(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    tables: tuple[list[dict[str, str]], ...] = ([], [])
    for one in rows:
        key = {"rate": one["rate"], "method": f"{one['method']} ({one['backend']})"}
        step = {
            "step ms": "{:,.1f} ({:,.1f} to {:,.1f})".format(one["step_ms"], *one["step_ms_spread"]),
            "sent MB": f"{one['tx_bytes'] / 1e6:,.2f}",
            "wire ratio": f"{one['wire_ratio']:.1f}",
            **{f"speed-up over {base}": text(one[f"speedup_over_{base}"], ".2f") for base in BASELINES},
        }
        parts = {f"{name} ms": f"{one[f'{name}_ms']:,.1f}" for name in ("alone", "exchange", "longest", "compress")}
        parts |= {"break-even Gbit/s": text(one["break_even_gbit_s"], ".2f"), "wrong": str(one["wrong"])}
        for lines, columns in zip(tables, (step, parts), strict=True):
            lines.append({**key, **columns})
    return "\n\n".join(table.markdown(lines, left=2) for lines in tables)


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    asked = plain({key: value for key, value in vars(args).items() if key not in ("variants", "environments")})
    results: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    rows: list[Row] = []
    failed: list[tuple[str, str]] = []
    for rate, backend, variant in runs(args):
        try:
            result = measure(args, rate, backend, variant)
        except netlab.NoLab as error:
            print(f"bench_exchange.py: {error}", file=sys.stderr)
            if rows:
                print(markdown(rows))
            return 2
        except Failed as error:
            failed.append((variant.label, rate))
            print(f"bench_exchange.py: {error}", file=sys.stderr)
            continue
        run = variant.label, rate, backend
        print(f"{' '.join(run)}: {make_row(*run, [result])['step_ms']:.1f} ms", file=sys.stderr, flush=True)
        results.setdefault(run, []).append(result)
        rows = compared([make_row(*key, of) for key, of in results.items()], failed)
        # After every run, so that nothing is lost if a later one is interrupted. ``failed``: (label, rate).
        config = {**asked, **result["environment"], "failed": failed}
        del config["settings"]  # each row has its own
        write_run(args.json, {"config": config, "rows": rows})
    if rows:
        print(markdown(rows))
    return 1 if failed or any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main(sys.argv[1:]))
