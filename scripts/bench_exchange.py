#!/usr/bin/env python3
"""Times whole steps of Horovod's unmodified optimizer, method by method, on the shapes of a well-known network.

    bench_exchange.py --shapes resnet50 --hosts 4 --rate 100mbit,1gbit --backend mpi,gloo --methods none,iwp --json FILE
    bench_exchange.py --shapes alexnet --ranks 2 --backend gloo --methods none,iwp@64 --option 'iwp@64:--density 1/64'
    bench_exchange.py --ranks 2 --methods iwp,iwp@cycle --environment 'iwp@cycle:HOROVOD_CYCLE_TIME=0.2'

With --hosts every rank has a network namespace of its own, whose egress is shaped to --rate (scripts/netlab.sh; root);
they are made for each run and removed after it, whatever happened. With --ranks all are on the loopback.

"backward" hands out prepared gradients, so it is short, and little can hide behind it: alone, on every rank at once,
without hooks. "step" is backward, exchange and update, of the slowest rank; "exchange" is what it takes beyond backward
and update alone; "compress" and "decompress" are the time inside the compression object without its waiting, mean over
ranks; "tx" is what the interface sent per rank and step, as it counts large segments, negotiation and the benchmark's
one barrier a step included (on the loopback what the method's books say, or a ring would send); "wire ratio" is what a
dense float32 ring sends, 2 (N - 1) / N x its bytes, / tx; "bus" is those bytes / exchange, as in nccl-tests; "x none"
and "x fp16" are how many times as fast the step is as the fastest of theirs at that rate, whatever the backend and what
follows an @; "even" is the bandwidth under which the saved bytes are worth the compressor's time, if nothing overlaps;
"wrong" counts failed checks of one more step (experiment/soundness.py; a method with --momentum-correction is checked
without it). Medians over steps of all --runs, from the fastest to the slowest in brackets. All ranks share this
machine's cores: times compare within one call only, "compress" is an upper bound, and "even" a lower one; and how
threads that wait share them with those that work differs from run to run, by more than from step to step. A shaped link
lets what it could send in 2 ms, at least 32 kB, pass at once after a pause.

The methods are those of train.py, each with its defaults there unless --option says otherwise, and ddp-fp16: torch's
DistributedDataParallel over Gloo with fp16_compress_hook. Exit status 1 if a run failed or anything was wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import table
from experiment import columns, compressors
from experiment.cli import end_by_exception, environments, texts
from experiment.comparison import Variant, variants
from experiment.exchangers import DDP_FP16
from experiment.lab import NoLab, check_rates, loopback, netlab
from experiment.runs import SCRIPTS, Failed, last_lines, run_group
from experiment.shapes import SHAPES


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--hosts", type=int, metavar="N", help="ranks in network namespaces, one each")
    where.add_argument("--ranks", type=int, metavar="N", help="ranks on the loopback")
    parser.add_argument("--rate", type=texts, default=["none"], help="of --hosts, as 100mbit; several as 1gbit,none")
    parser.add_argument("--shapes", choices=SHAPES, default="resnet50")
    parser.add_argument("--methods", type=texts, default=[*compressors.METHODS, DDP_FP16], help="by default all")
    parser.add_argument("--option", action="append", default=[], metavar="METHOD:OPTIONS", help="for one method only")
    parser.add_argument("--environment", action="append", default=[], metavar="METHOD:NAME=VALUE", help="of its ranks")
    parser.add_argument("--backend", type=texts, default=["mpi"], help="of Horovod, mpi or gloo, or both as mpi,gloo")
    parser.add_argument("--runs", type=int, default=1, help="of every method, in turn")
    parser.add_argument("--steps", type=int, default=7, help="measured in each run")
    parser.add_argument("--warmup", type=int, default=3, metavar="STEPS")
    parser.add_argument("--max-seconds", type=float, default=120, help="no more steps then, but at least 5")
    parser.add_argument("--timeout", type=float, default=900, metavar="SECONDS", help="after which a run is killed")
    parser.add_argument("--momentum", type=float, default=0.9, help="of the optimizer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows here")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write the step times by method and rate here")
    args = parser.parse_args(argv)
    for name, least in (("hosts", 2), ("ranks", 2), ("runs", 1), ("steps", 1), ("warmup", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            parser.error(f"--{name} must be at least {least}, got {value}")
    try:
        check_rates(args.rate)
        known = variants([label for label in args.methods if label != DDP_FP16], args.option)
    except ValueError as error:
        parser.error(str(error))
    for name in ("rate", "backend", "methods"):
        if len(set(getattr(args, name))) < len(getattr(args, name)):
            parser.error(f"--{name} {','.join(getattr(args, name))}: each only once")
    if unknown := set(args.backend) - {"mpi", "gloo"}:
        parser.error(f"--backend must be of mpi and gloo, got {', '.join(sorted(unknown))}")
    if args.ranks and args.rate != ["none"]:
        parser.error("--rate needs --hosts: the loopback has none")
    found = {variant.label: variant for variant in [*known, Variant(DDP_FP16)]}
    args.variants = [found[label] for label in args.methods]
    try:
        args.environments = environments(args.methods, args.environment)
    except ValueError as error:
        parser.error(str(error))
    return args


def runs(args: argparse.Namespace) -> Iterator[tuple[str, str, Variant]]:
    """Rate, backend and variant: a run of each, then the next of each. DDP's backend is always Gloo, and what differs
    in settings of Open MPI only is not run by Gloo."""
    for rate, _ in itertools.product(args.rate, range(args.runs)):
        for backend, variant in itertools.product(args.backend, args.variants):
            names = args.environments[variant.label]
            if variant.method == DDP_FP16:
                if backend == args.backend[-1]:
                    yield rate, "gloo", variant
            elif backend == "mpi" or not names or not all(name.startswith("OMPI_MCA_") for name in names):
                yield rate, backend, variant


def measure(args: argparse.Namespace, rate: str, backend: str, variant: Variant) -> dict[str, Any]:
    """What the ranks measured; ``Failed`` or ``NoLab`` if they did not."""
    gloo = backend == "gloo"
    place = netlab(args.hosts, rate, gloo) if args.hosts else loopback(args.ranks, gloo)
    with tempfile.TemporaryDirectory(prefix="bench_exchange.") as folder, place as there:
        file, log = Path(folder) / "result.json", Path(folder) / "log"
        given = {name: str(getattr(args, name)) for name in ("shapes", "steps", "warmup", "momentum", "seed")}
        given |= {"method": variant.method, "interface": there.interface, "master": there.master, "result": str(file)}
        given |= {"max-seconds": str(args.max_seconds), "timeout": str(args.timeout)}
        environment = args.environments[variant.label]
        options = [word for name, value in given.items() for word in (f"--{name}", value)]
        options += [f"--expect={name}={value}" for name, value in environment.items()]
        run = f"{variant.label} by {backend} at {rate}"
        with log.open("w") as stream:
            command = [*there.command, str(SCRIPTS / "exchange_rank.py"), *options, *variant.options]
            status = run_group(command, args.timeout, stream, environment)
        if status is None:
            raise Failed(f"{run} was killed after {args.timeout:g} s\n{last_lines(log)}")
        if status or not file.exists():
            raise Failed(f"{run} ended with status {status}\n{last_lines(log)}")
        result: dict[str, Any] = json.loads(file.read_text())
        return result


def write(
    file: Path,
    args: argparse.Namespace,
    environment: dict[str, Any],
    rows: Sequence[columns.Row],
    failed: Sequence[tuple[str, str]],
) -> None:
    """``failed``: (method, rate) of each run that came to nothing."""
    asked = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    asked.pop("variants")
    asked.pop("environments")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"config": {**asked, **environment, "failed": failed}, "rows": rows}, indent=1) + "\n")


def plot(args: argparse.Namespace, rows: Sequence[columns.Row]) -> Path:
    """Bars of the median step, a group for each rate and a colour for each method; the lines are the spread."""
    labels = list(dict.fromkeys((row["method"], row["backend"]) for row in rows))
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    file: Path = args.plot / f"exchange-{args.shapes}-{args.hosts or args.ranks}-{'-'.join(args.backend)}.png"
    with table.chart(file, len(labels), yscale="log", ylabel="step, ms", xlabel="rate of every link") as axes:
        for number, label in enumerate(labels):
            offset, width = table.beside(number, len(labels))
            mine = [row for row in rows if (row["method"], row["backend"]) == label]
            where = [rates.index(row["rate"]) + offset for row in mine]
            steps = [row["step_ms"] for row in mine]
            spread = [
                [row["step_ms"] - row["step_ms_spread"][0] for row in mine],
                [row["step_ms_spread"][1] - row["step_ms"] for row in mine],
            ]
            axes.bar(where, steps, width, label=", ".join(label), yerr=spread, error_kw={"linewidth": 0.8})
        axes.set_xticks(range(len(rates)), labels=rates)
    return file


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    results: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    rows: list[columns.Row] = []
    failed: list[tuple[str, str]] = []
    for rate, backend, variant in runs(args):
        try:
            result = measure(args, rate, backend, variant)
        except NoLab as error:
            print(f"bench_exchange.py: {error}", file=sys.stderr)
            if rows:
                print(columns.markdown(rows))
            return 2
        except Failed as error:
            failed.append((variant.label, rate))
            print(f"bench_exchange.py: {error}", file=sys.stderr)
            continue
        run = variant.label, rate, backend
        for text in result["failures"][:5]:  # the file has them all
            print(f"bench_exchange.py: {' '.join(run)}: {text}", file=sys.stderr)
        this = columns.row(*run, [result], sent_by_ring=2)
        print(f"{' '.join(run)}: {this['step_ms']:.1f} ms", file=sys.stderr, flush=True)
        results.setdefault(run, []).append(result)
        rows = columns.compared([columns.row(*key, of, sent_by_ring=2) for key, of in results.items()], failed)
        if args.json:  # after every run, so that nothing is lost if a later one is interrupted
            write(args.json, args, result["environment"], rows, failed)
    if rows:
        print(columns.markdown(rows))
        if args.plot:
            plot(args, rows)
    return 1 if failed or any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    end_by_exception()
    sys.exit(main(sys.argv[1:]))
