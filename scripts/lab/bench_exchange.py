#!/usr/bin/env python3
"""Time whole optimizer steps, method by method, on the shapes of a well-known network: Horovod and torch DDP.

    bench_exchange.py --hosts 4 --rate 100mbit,1gbit --methods none,iwp --json FILE.jsonl/NAME
    bench_exchange.py --hosts 4 --rate 1gbit --shapes gpt2 --pause-ms 350 --methods fp16,iwp@local \\
        --option 'iwp@local:--local-steps 8 --density 1 --values lloyd4'
    bench_exchange.py --hosts 2 --ranks-per-node 2 --methods none,iwp,iwp@nodes --option iwp@nodes:--nodes=2

With --hosts, every rank, or --ranks-per-node of them, has a network namespace of its own, whose egress is shaped to
--rate, with --delay-ms of delay one way (netlab.sh; root); they are made for each run and removed after it. With
--ranks, all are on the loopback.
Methods are those of train.py, with its defaults except for --option, and its options of local steps. They run on the
unmodified Horovod optimizer, by MPI, or, as ddp-METHOD, on DistributedDataParallel over Gloo: ddp-none (no hook),
ddp-fp16 (fp16_compress_hook), ddp-powersgd (torch's powerSGD_hook, rank 4, one bucket) and any method of hvd_compress
(ddp-iwp).

Rows are those of `hvd-compress bench`: medians over the steps of all --runs. Also printed are, in ms, backward and
update alone, which are short, because gradients are prepared, unless --pause-ms stands for a computation on a GPU; what
a step takes beyond these; and the longest step between two exchanges. Bytes are those of a host and a step, by its
network interface's counter, with negotiation and the benchmark's barrier; on the loopback those of a rank, by stats().
"speed-up" is over the fastest row of none and fp16 at that rate, by any host. All ranks share this machine's cores:
compare within one call only. Exit status 1 if a run failed or replicas differ.
"""

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experiments"))

import table
from experiment import comparison, compressors, netlab
from experiment.comparison import Variant, texts
from experiment.files import plain, script_parser
from experiment.result_file import run_path, write_run
from experiment.runs import SCRIPTS
from lab_shapes import SHAPES

from hvd_compress.cli import bench
from hvd_compress.cli.network import bandwidth
from hvd_compress.cli.processes import Failed, exit_on_signals, run_group

DDP = ["ddp-none", "ddp-fp16", "ddp-powersgd", "ddp-iwp"]
BASELINES = ("none", "fp16")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = script_parser(__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--hosts", type=int, metavar="N", help="ranks in network namespaces, one each")
    where.add_argument("--ranks", type=int, metavar="N", help="ranks on the loopback")
    parser.add_argument("--ranks-per-node", type=int, default=1, metavar="N", help="on each of --hosts")
    parser.add_argument("--rate", type=texts, default=["none"], help="of --hosts, as 100mbit; several as 1gbit,none")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="of the links of --hosts, one way")
    parser.add_argument("--shapes", choices=SHAPES, default="resnet50")
    horovod = [name for name, method in compressors.METHODS.items() if "horovod" in method.hosts]
    comparison.add_arguments(parser, [*horovod, *DDP])
    parser.add_argument("--environment", action="append", default=[], metavar="METHOD:NAME=VALUE", help="of its ranks")
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
    if args.ranks and args.ranks_per_node > 1:
        parser.error("--ranks-per-node needs --hosts; on the loopback, --option METHOD:--nodes=N divides --ranks")
    if args.ranks and (args.rate != ["none"] or args.delay_ms):
        parser.error("--rate and --delay-ms need --hosts: the loopback has none")
    return args


def measure(args: argparse.Namespace, rate: str, variant: Variant) -> dict[str, Any]:
    """What the ranks measured; ``Failed`` or ``NoLab`` if they did not."""
    launcher = "ddp" if variant.host == "ddp" else "mpi"
    if args.hosts:
        delay = f"{args.delay_ms:g}ms" if args.delay_ms else None
        place = netlab.up(args.hosts, rate, launcher, args.ranks_per_node, delay)
    else:
        place = nullcontext(netlab.loopback(args.ranks, launcher))
    with tempfile.TemporaryDirectory(prefix="bench_exchange.") as folder, place as start:
        file = Path(folder) / "result.json"
        names = ("shapes", "steps", "pause_ms", "max_seconds", "timeout")
        options = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names]
        options += [f"--compression={variant.method}", f"--host={variant.host}", f"--result={file}"]
        options += [f"--expect={name}={value}" for name, value in args.environments[variant.label].items()]
        command = [*start, str(SCRIPTS / "lab" / "exchange_rank.py"), *options, *variant.options]
        name = f"{variant.label} at {rate}"
        run_group(command, args.timeout, Path(folder) / "log", args.environments[variant.label], name)
        result: dict[str, Any] = json.loads(file.read_text())
        return result


def method_of(label: str) -> str:
    return label.partition("@")[0].removeprefix("ddp-")


def markdown(rows: Sequence[bench.Row], pause: float) -> str:
    """Two tables of the same rows: what `hvd-compress bench` prints; the parts of a step, with the share of it that is
    the ``pause``, in ms."""
    tables: tuple[list[dict[str, str]], ...] = ([], [])
    for row in rows:
        printed, gain = bench.cells(row), row["break_even_gbit_s"]
        key = {"rate": row["rate"], "method": printed.pop("method")}
        parts = {f"{name} ms": f"{row[f'{name}_ms']:,.1f}" for name in ("alone", "exchange", "longest")}
        parts |= {"computing": f"{pause / row['step_ms']:.0%}"} if pause else {}
        parts |= {"wire ratio": f"{row['wire_ratio']:.1f}", "break-even Gbit/s": f"{gain:.2f}" if gain else "-"}
        for lines, columns in zip(tables, (printed, parts), strict=True):
            lines.append({**key, **columns})
    return "\n\n".join(table.markdown(lines, left=2) for lines in tables)


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    asked = plain({key: value for key, value in vars(args).items() if key not in ("variants", "environments")})
    results: dict[tuple[str, str], list[dict[str, Any]]] = {}
    rows: list[bench.Row] = []
    failed: list[tuple[str, str]] = []  # label, rate
    for rate, _, variant in itertools.product(args.rate, range(args.runs), args.variants):
        try:
            result = measure(args, rate, variant)
        except netlab.NoLab as error:
            sys.exit(f"bench_exchange.py: {error}")
        except Failed as error:
            failed.append((variant.label, rate))
            print(f"bench_exchange.py: {error}", file=sys.stderr)
            continue
        results.setdefault((variant.label, rate), []).append(result)
        rows = []
        for each in args.rate:
            of_rate = [
                {"method": label, "rate": at, "settings": of[0]["environment"]["settings"], **bench.summary(of)}
                for (label, at), of in results.items() if at == each
            ]  # fmt: skip
            rows += bench.compared(of_rate, BASELINES, method_of)
        print(f"{variant.label} at {rate}: {result['steps_ms']}", file=sys.stderr, flush=True)
        # After every run, so that nothing is lost if a later one is interrupted.
        config = {**asked, **result["environment"], "failed": failed}
        del config["settings"]  # each row has its own
        write_run(args.json, {"config": config, "rows": rows})
    print(markdown(rows, args.pause_ms) if rows else "")
    return 1 if failed or not all(row["replicas_equal"] for row in rows) else 0


if __name__ == "__main__":
    with exit_on_signals():
        sys.exit(main(sys.argv[1:]))
