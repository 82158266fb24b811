#!/usr/bin/env python3
"""One rank of `bench_exchange.py`, which starts it under run.sh or netlab.sh: measures a method as `hvd-compress bench`
does; rank 0 writes what was measured."""

import argparse
import faulthandler
import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experiments"))

import torch
from experiment import compressors, hosts, local_training, metrics, netlab
from experiment.files import write_json
from experiment.local_training import LocalTraining
from lab_shapes import SHAPES

from hvd_compress.cli.bench_rank import Bench
from hvd_compress.cli.ranks import HOSTS

MOMENTUM = 0.9


class Counted(Bench):
    """Counts the bytes that leave this host in a step."""

    def timed(self, step: Callable[[], None], period: int = 1) -> list[float]:
        taken = 0

        def counted() -> None:
            nonlocal taken
            step()
            taken += 1

        self.ranks.gather(None)  # DDP may still send the model to other ranks
        before, found = int(netlab.COUNTER.read_text()), super().timed(counted, period)
        self.sent_bytes = (int(netlab.COUNTER.read_text()) - before) / taken
        return found


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--compression", choices=compressors.METHODS, required=True)
    parser.add_argument("--host", choices=HOSTS, required=True)
    parser.add_argument("--shapes", choices=SHAPES, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--pause-ms", type=float, default=0.0)
    for name in ("max-seconds", "timeout"):
        parser.add_argument(f"--{name}", type=float, required=True)
    parser.add_argument("--nodes", type=int, help="into how many the ranks are divided for compressors")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--expect", action="append", default=[], metavar="NAME=VALUE", help="of the environment")
    compressors.METHODS[parser.parse_known_args(argv)[0].compression].add_arguments(parser)
    local_training.add_arguments(parser)
    parser.set_defaults(seed=0)
    args = parser.parse_args(argv)
    try:
        local_training.complete(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def main(args: argparse.Namespace) -> int:
    # A rank that hangs prints its stack and ends, whatever becomes of the launcher.
    faulthandler.dump_traceback_later(args.timeout, exit=True)
    torch.set_num_threads(1)
    for setting in args.expect:  # a launcher may not pass a setting on to other hosts
        name, _, value = setting.partition("=")
        if os.environ.get(name) != value:
            raise SystemExit(f"exchange_rank.py: {name} is {os.environ.get(name)!r} here, not {value!r}")
    host = hosts.start(args.host, nodes=args.nodes or 0)
    on_network = netlab.COUNTER.exists() and "HVD_NETLAB" in os.environ
    kind, named = Counted if on_network else Bench, list(SHAPES[args.shapes]())
    bench = kind(host, named, args.steps, args.max_seconds, pause=args.pause_ms / 1e3)
    # A method that sends signs allows no momentum; momentum correction takes it from the optimizer, whose update is
    # cheaper then.
    momentum = 0.0 if getattr(args, "sign", False) else MOMENTUM
    found = {"alone_ms": bench.alone(0.0 if getattr(args, "momentum_correction", False) else momentum)}
    model, optimizer = bench.replica(momentum)
    coupling = LocalTraining(args, host) if args.local_steps else host
    compression = coupling.compression(args, args.compression, model, optimizer)
    found |= bench.measure(model, optimizer, compression, coupling, args.local_steps or 1)
    sent = host.gather(getattr(bench, "sent_bytes", found["sent_bytes"]))
    if host.rank == 0:
        found["sent_bytes"] = sum(sent) / host.size
        write_json(args.result, {**found, "environment": {**metrics.environment(), "optimizer": "SGD, fused"}})
    return host.close(0)


if __name__ == "__main__":
    sys.exit(main(parse(sys.argv[1:])))
