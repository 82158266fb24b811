#!/usr/bin/env python3
"""Time steps of a sharded transformer (FSDP2) on hosts with slow links between them: native HSDP, and compressors.

    bench_hsdp.py --hosts 2 --ranks-per-node 2 --rate 100mbit,1gbit --json docs/results/exchange-hsdp/runs.jsonl/gpt

Every host is a network namespace, whose egress is shaped to --rate (netlab.sh; root), with --ranks-per-node ranks that
shard the model: --layers layers of a width of 512, 3.15 M parameters each. Batches are small, to time exchanges.
  native, native-bf16   fully_shard() with a mesh of two dimensions; gradients in float32, or reduced in bfloat16
  demo, iwp             register_fsdp_hooks() with that compressor and its defaults
  low_bit               recipes.low_bit(), local steps; a step is the mean over a period
Figures: the median over --steps of the slowest rank's step; bytes that leave a host in a step, by its network card.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experiments"))

import torch
from exchange_rank import Counted
from experiment import hosts, metrics, netlab
from experiment.comparison import texts
from experiment.files import plain, script_parser, write_json
from experiment.result_file import run_path, write_run
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import hvd_compress
from hvd_compress.cli.processes import exit_on_signals, run_group

COMPRESSORS = {"demo": hvd_compress.DeMo, "iwp": hvd_compress.IWP}
METHODS = ("native", "native-bf16", *COMPRESSORS, "low_bit")
WIDTH = 512


def parse(argv: list[str]) -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--rate", type=texts, default=["100mbit", "1gbit"])
    parser.add_argument("--methods", type=texts, default=[*METHODS])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="after which a run is killed")
    parser.add_argument("--json", type=run_path, metavar="FILE.jsonl/NAME", help="write all rows here")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)  # of a rank
    args = parser.parse_args(argv)
    if unknown := set(args.methods) - {*METHODS}:
        parser.error(f"--methods must be of {', '.join(METHODS)}, got {', '.join(sorted(unknown))}")
    return args


class Training:
    """One rank's steps of one method."""

    def __init__(self, args: argparse.Namespace, method: str) -> None:
        mesh = init_device_mesh("cpu", (args.hosts, args.ranks_per_node), mesh_dim_names=("replicate", "shard"))
        torch.manual_seed(0)
        layers = [nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, 0.0, batch_first=True) for _ in range(args.layers)]
        self.model = nn.Sequential(*layers)
        self.shards = args.ranks_per_node
        self.entries = sum(p.numel() for p in self.model.parameters())
        native = method.startswith("native")
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if method == "native-bf16" else None)
        for module in (*self.model, self.model):
            fully_shard(module, mesh=mesh if native else mesh["shard"], mp_policy=policy)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.local: hvd_compress.LocalSteps | None = None
        group = mesh.get_group("replicate")
        if method == "low_bit":
            self.local = hvd_compress.recipes.low_bit(
                self.model, self.optimizer, process_group=group, restore_length=False
            )
        elif not native:
            compression = COMPRESSORS[method](self.model, process_group=group)
            hvd_compress.register_fsdp_hooks(self.model, compression)
        self.x = torch.randn(1, 8, WIDTH, generator=torch.Generator().manual_seed(distributed.get_rank()))

    @property
    def period(self) -> int:
        return self.local.period if self.local else 1

    def step(self) -> None:
        """A step, or a period of local steps."""
        ended = False
        while not ended:
            self.optimizer.zero_grad()
            self.model(self.x).square().mean().backward()
            self.optimizer.step()
            ended = self.local is None or self.local.step()

    def check(self) -> bool:
        """Whether this rank's shards are the same in all replicas. (After local steps in few bits, all of them are.)"""
        flat = torch.cat([p.to_local().detach().flatten() for p in self.model.parameters()])  # type: ignore[attr-defined]
        everyone = [torch.empty_like(flat) for _ in range(distributed.get_world_size())]
        distributed.all_gather(everyone, flat)
        same_shard = everyone[distributed.get_rank() % self.shards :: self.shards]
        return all(torch.equal(flat, other) for other in same_shard)


def rank(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    host = hosts.start("ddp")
    training, bench = Training(args, args.methods[0]), Counted(host, [], args.steps)
    periods = host.gather(bench.timed(training.step))
    steps = [1e3 * max(ranks) / training.period for ranks in zip(*periods, strict=True)]
    equal = all(host.gather(training.check()))
    if host.rank == 0:
        found = {"step_ms": statistics.median(steps), "steps_ms": steps, "replicas_equal": equal}
        found |= {"tx_bytes": bench.sent_bytes / training.period, "entries": training.entries}
        write_json(args.result, found)
    host.close(0)


def main(args: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    for rate in args.rate:
        for method in args.methods:
            with (
                tempfile.TemporaryDirectory(prefix="bench_hsdp.") as folder,
                netlab.up(args.hosts, rate, "ddp", args.ranks_per_node) as start,
            ):
                file = Path(folder) / "result.json"
                options = {"hosts": args.hosts, "ranks-per-node": args.ranks_per_node, "layers": args.layers}
                options |= {"steps": args.steps, "methods": method, "result": file}
                command = [*start, __file__, *(f"--{name}={value}" for name, value in options.items())]
                run_group(command, args.timeout, Path(folder) / "log", {}, f"{method} at {rate}")
                found = json.loads(file.read_text())
            rows.append({"method": method, "rate": rate, **found})
            best = min((row["step_ms"] for row in rows if row["rate"] == rate and "native" in row["method"]), default=0)
            ratio = f", native x {best / found['step_ms']:.2f}" if best else ""
            print(f"{rate} {method}: {found['step_ms']:,.0f} ms, {found['tx_bytes'] / 1e6:.2f} MB{ratio}", flush=True)
            config = plain({name: value for name, value in vars(args).items() if name != "result"})
            write_run(args.json, {"config": {**config, **metrics.environment()}, "rows": rows})
    return 0 if all(row["replicas_equal"] for row in rows) else 1


if __name__ == "__main__":
    parsed = parse(sys.argv[1:])
    if parsed.result:
        rank(parsed)
    else:
        with exit_on_signals():
            sys.exit(main(parsed))
