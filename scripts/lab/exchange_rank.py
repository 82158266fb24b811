#!/usr/bin/env python3
"""One rank of `bench_exchange.py`, which starts it under run.sh or netlab.sh: measures a method; rank 0 writes what all
ranks measured."""

import argparse
import faulthandler
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experiments"))

import torch
from experiment import compressors, hosts, metrics, soundness
from experiment.files import write_json

from hvd_compress.cli.shapes import SHAPES
from hvd_compress.cli.synthetic import Synthetic

COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")  # of a netlab host
#: At least so many steps are measured, if they were asked for, however slow the network.
LEAST = 5
MOMENTUM = 0.9


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--method", choices=compressors.METHODS, required=True)
    parser.add_argument("--host", choices=("horovod", "ddp"), required=True)
    parser.add_argument("--shapes", choices=SHAPES, required=True)
    for name in ("steps", "warmup"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("max-seconds", "timeout"):
        parser.add_argument(f"--{name}", type=float, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--expect", action="append", default=[], metavar="NAME=VALUE", help="of the environment")
    compressors.METHODS[parser.parse_known_args(argv)[0].method].add_arguments(parser)
    parser.set_defaults(seed=0)
    return parser.parse_args(argv)


class Bench:
    """Steps of a model on this rank, each begun together with all others."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.host = args, hosts.start(args.host)
        self.model = Synthetic(SHAPES[args.shapes](), self.host.rank)
        # Of the optimizer: a method that sends signs allows none.
        self.signs = bool(getattr(args, "sign", False))
        self.momentum = 0.0 if self.signs else MOMENTUM
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.0, momentum=self.momentum, fused=True)
        self.compression: Any = None
        # Momentum correction takes the optimizer's momentum away: its update is then the cheaper one.
        self.takes_momentum = bool(getattr(args, "momentum_correction", False))

    def backward(self) -> None:
        self.module().backward()

    def synchronize(self) -> None:
        self.host.synchronize(self.optimizer)

    def update(self) -> None:
        self.host.update(self.optimizer)

    def alone(self) -> dict[str, list[float]]:
        """Backward, and backward and update, of every rank at once without exchange."""
        self._set(momentum=0.0 if self.takes_momentum else self.momentum)

        def step() -> dict[str, float]:
            start = time.perf_counter()
            self.model().backward()
            backward = time.perf_counter()
            self.optimizer.step()
            return {"backward": backward - start, "base": time.perf_counter() - start}

        return self._repeat(step, self.args.warmup, max(self.args.steps, LEAST))

    def exchanging(self) -> dict[str, list[float]]:
        """The same with the exchange; ``sent`` is the bytes that this rank sent per step."""
        # From now on the weights move, so that equal replicas mean something; gradients do not depend on them. The
        # velocities of the steps without exchange differ between ranks and are dropped.
        self.optimizer.state.clear()
        self._set(momentum=self.momentum, lr=1e-3)
        self.compression = self.host.compression(self.args, self.args.method, self.model, self.optimizer)
        self.module, self.optimizer = self.host.wrap(self.model, self.optimizer, self.compression)

        def step() -> dict[str, float]:
            start = time.perf_counter()
            self.backward()
            backward = time.perf_counter()
            self.synchronize()
            self.update()
            return {"hooked": backward - start, "step": time.perf_counter() - start}

        self._repeat(step, self.args.warmup, 0)
        before = self._sent()
        measured = self._repeat(step, 0, self.args.steps)
        measured["sent"] = [(self._sent() - before) / len(measured["step"])]
        measured["compress"] = [self.compression.stats()["compress_ms"] / 1e3]
        return measured

    def failures(self) -> list[str]:
        """What is wrong with one more step."""
        args = self.args
        if self.takes_momentum:  # the check does not follow velocities
            self.compression.return_momentum(self.optimizer)
        half = "fp16" in (args.method, getattr(args, "values", None), getattr(args, "dense_values", None))
        check = "bias" if getattr(args, "error_feedback", None) is False else "sum"
        if args.method == "ddp-powersgd":
            check = "none"  # its residual cannot be asked for
        elif self.signs:
            check = "signs"
        return soundness.failures(self, self.model, soundness.HALF if half else soundness.EXACT, check)

    def _set(self, **options: float) -> None:
        for group in self.optimizer.param_groups:
            group.update(options)

    def _repeat(self, step: Callable[[], dict[str, float]], warmup: int, steps: int) -> dict[str, list[float]]:
        """So many steps, or at least LEAST in --max-seconds; the seconds of each, by what they were spent on."""
        measured: dict[str, list[float]] = {}
        begin = time.perf_counter()
        for number in range(warmup + steps):
            late = number >= warmup + LEAST and time.perf_counter() - begin > self.args.max_seconds
            if self.host.any(late and self.host.rank == 0):  # rank 0's clock counts for all
                break
            seconds = step()
            self.optimizer.zero_grad()
            if number >= warmup:
                for key, value in seconds.items():
                    measured.setdefault(key, []).append(value)
        return measured

    def _sent(self) -> float:
        """Bytes so far, by the interface's counter, or on the loopback by ``stats()``."""
        self.host.any(False)
        if COUNTER.exists() and os.environ.get("HVD_NETLAB"):
            return float(COUNTER.read_text())
        return float(self.compression.stats()["total"]["wire_bytes"])


def main(args: argparse.Namespace) -> int:
    # A rank that hangs prints its stack and ends, whatever becomes of the launcher.
    faulthandler.dump_traceback_later(args.timeout, exit=True)
    torch.set_num_threads(1)
    for setting in args.expect:  # a launcher may not pass a setting on to other hosts
        name, _, value = setting.partition("=")
        if os.environ.get(name) != value:
            raise SystemExit(f"exchange_rank.py: {name} is {os.environ.get(name)!r} here, not {value!r}")
    bench = Bench(args)
    measured = {**bench.alone(), **bench.exchanging()}
    failures = bench.failures()
    everyone = bench.host.gather(measured)
    if bench.host.rank == 0:
        environment = {**metrics.environment(), "optimizer": "SGD, fused"}
        content = {"ranks": bench.host.size, "entries": bench.model.numel, "measured": everyone, "failures": failures}
        content |= {"settings": environment.pop("settings"), "environment": environment}
        write_json(args.result, content)
    return bench.host.close(0)


if __name__ == "__main__":
    sys.exit(main(parse(sys.argv[1:])))
