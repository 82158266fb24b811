#!/usr/bin/env python3
"""One rank of `bench_exchange.py`, which starts it under run.sh or netlab.sh: measures a method, and rank 0 writes what
all ranks measured."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from experiment import compressors, soundness
from experiment.exchangers import DDP_FP16, Clock, DdpExchanger, Exchanger, HorovodExchanger
from experiment.shapes import SHAPES
from experiment.synthetic import Synthetic
from torch import nn
from torch.optim import Optimizer

COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")
#: However slow the network, a median is of so many steps, if they were asked for.
LEAST = 5


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--method", choices=[*compressors.METHODS, DDP_FP16], required=True)
    parser.add_argument("--shapes", choices=SHAPES, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--max-seconds", type=float, required=True)
    parser.add_argument("--timeout", type=float, required=True)
    parser.add_argument("--momentum", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--interface", choices=("eth0", "lo"), required=True)
    parser.add_argument("--master", required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument(
        "--expect", action="append", default=[], metavar="NAME=VALUE", help="of this rank's environment"
    )
    chosen = parser.parse_known_args(argv)[0].method
    if chosen in compressors.METHODS:
        compressors.METHODS[chosen].add_arguments(parser)
    return parser.parse_args(argv)


def exchanger(args: argparse.Namespace) -> Exchanger:
    if args.method == DDP_FP16:
        return DdpExchanger(args.master, args.interface)

    def build(model: nn.Module, optimizer: Optimizer, ranks: int) -> Any:
        setting = compressors.Setting(model, optimizer, steps_per_epoch=1000, ranks=ranks)
        return compressors.METHODS[args.method].build(args, setting)

    return HorovodExchanger(build)


class Bench:
    """Steps of a model on this rank, each begun together with all others."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.exchanger = exchanger(args)
        self.model = Synthetic(SHAPES[args.shapes](), self.exchanger.rank, args.seed)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0, momentum=args.momentum, fused=True)
        # Momentum correction takes the optimizer's momentum away: its update is then the cheaper one.
        self.taken = bool(getattr(args, "momentum_correction", False))

    def alone(self) -> dict[str, list[float]]:
        """Backward, and backward and update, of this rank for itself, while the others do the same."""
        self._set(momentum=0.0 if self.taken else self.args.momentum)

        def step() -> dict[str, float]:
            start = time.perf_counter()
            self.model().backward()
            backward = time.perf_counter()
            self.optimizer.step()
            return {"backward": backward - start, "base": time.perf_counter() - start}

        return self._repeat(step, self.args.warmup, max(self.args.steps, LEAST))

    def exchanging(self) -> dict[str, list[float]]:
        """The same with the exchange; ``sent`` is what this rank's interface sent in a step, or the books say."""
        # From now on the weights move, or equal replicas would mean nothing. Gradients do not depend on them, so
        # nothing diverges; and the velocities of steps taken alone, which differ from rank to rank, are forgotten.
        self.optimizer.state.clear()
        self._set(momentum=self.args.momentum, lr=1e-3)
        self.exchanger.attach(self.model, self.optimizer)
        clock = None if self.exchanger.compression is None else Clock(self.exchanger.compression)

        def step() -> dict[str, float]:
            start = time.perf_counter()
            self.exchanger.backward()
            backward = time.perf_counter()
            self.exchanger.synchronize()
            self.exchanger.update()
            seconds = {"hooked": backward - start, "step": time.perf_counter() - start}
            return seconds if clock is None else {**seconds, **clock.lap()}

        self._repeat(step, self.args.warmup, 0)
        before = self._sent()
        measured = self._repeat(step, 0, self.args.steps)
        after = self._sent()
        if before is not None and after is not None:
            measured["sent"] = [(after - before) / len(measured["step"])]
        return measured

    def failures(self) -> list[str]:
        """What is wrong with one more step."""
        args = self.args
        if self.taken:
            # What the velocity adds would have to be followed, too; without it the books are simple.
            self.exchanger.compression.return_momentum(self.optimizer)
        half = args.method in ("fp16", DDP_FP16)
        half = half or "fp16" in (getattr(args, "values", None), getattr(args, "dense_values", None))
        forgets = not getattr(args, "error_feedback", True)
        share = soundness.HALF if half else soundness.EXACT
        return soundness.failures(self.exchanger, self.model, share, forgets)

    def _set(self, **options: float) -> None:
        for group in self.optimizer.param_groups:
            group.update(options)

    def _repeat(self, step: Callable[[], dict[str, float]], warmup: int, steps: int) -> dict[str, list[float]]:
        """So many steps, or at least LEAST in --max-seconds; the seconds of each, by what they were spent on."""
        measured: dict[str, list[float]] = {}
        begin = time.perf_counter()
        for number in range(warmup + steps):
            late = number >= warmup + LEAST and time.perf_counter() - begin > self.args.max_seconds
            # Rank 0 looks at the clock, for all of them.
            if self.exchanger.any(late and self.exchanger.rank == 0):
                break
            seconds = step()
            self.optimizer.zero_grad()
            if number >= warmup:
                for key, value in seconds.items():
                    measured.setdefault(key, []).append(value)
        return measured

    def _sent(self) -> float | None:
        self.exchanger.any(False)
        if self.args.interface == "eth0":
            return float(COUNTER.read_text())
        if self.exchanger.compression is None:
            return None
        return float(self.exchanger.compression.stats()["total"]["wire_bytes"])


def main(args: argparse.Namespace) -> int:
    # Whatever becomes of the launcher, a rank that hangs says where, and ends.
    faulthandler.dump_traceback_later(args.timeout, exit=True)
    torch.set_num_threads(1)
    for setting in args.expect:
        # A launcher may keep what it was given from ranks on other hosts.
        name, _, value = setting.partition("=")
        if os.environ.get(name) != value:
            raise SystemExit(f"exchange_rank.py: {name} is {os.environ.get(name)!r} here, not {value!r}")
    bench = Bench(args)
    measured = [bench.alone(), bench.exchanging()]
    failures = bench.failures()
    everyone = bench.exchanger.gather({**measured[0], **measured[1]})
    if bench.exchanger.rank == 0:
        from experiment import metrics

        environment = {**metrics.environment(), "optimizer": "SGD, fused"}
        content = {
            "ranks": bench.exchanger.size,
            "entries": bench.model.numel,
            "measured": everyone,
            "failures": failures,
            "settings": environment.pop("settings"),
            "environment": environment,
        }
        args.result.write_text(json.dumps(content))
    bench.exchanger.close()
    if args.method == DDP_FP16:
        # Gloo's threads in torch may outlive the group, and one that is still there when the process takes itself
        # apart ends it by abort(): one run of eight, measured and written down as it was.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0


if __name__ == "__main__":
    sys.exit(main(parse(sys.argv[1:])))
