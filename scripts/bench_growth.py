#!/usr/bin/env python3
"""What one rank's compressor costs as the network and the number of ranks grow: time a step, and memory.

    bench_growth.py --methods iwp,topk --millions 1,10,100,200 --ranks 4 --json FILE
    bench_growth.py --methods iwp --millions 25 --ranks 2,4,8,64

One process and one thread stand for a rank. Its fellow ranks are mirror images that send what it sends, so that results
have the sizes of a real step and nobody competes for the processor; the time in which the mirror makes them is not
counted, nor is any network. Networks are layers of 1000 by 1000, gradients normal, new in every step.

"ms" is what all `compress` and `decompress` of a step take, median, from the fastest to the slowest in brackets; "ns an
entry" is that by the network's size. "held" is the memory, in bytes an entry, that the compressor has beyond weights
and gradients between steps, and "peak" the most that it has within one: resident memory by /proc/self/status, after a
small compressor has loaded all code, and after what is free was given back to the system.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import table
import torch
from experiment.cli import texts

from hvd_compress import DGC, FFT, IWP, MIPD, MP2, QSGD, Compressor, SlimDP, TernGrad, TopK
from hvd_compress.engine.collectives import Request

METHODS: dict[str, Callable[..., Compressor]] = {
    "iwp": IWP,
    "fft": FFT,
    "mipd": MIPD,
    "slimdp": SlimDP,
    "mp2": MP2,
    "topk": TopK,
    "dgc": DGC,
    "qsgd": QSGD,
    "terngrad": TernGrad,
}
LAYER = 1000, 1000
SLACK = 1 << 20


class _Done:
    def __init__(self, result: torch.Tensor) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def result(self) -> torch.Tensor:
        return self._result


class Mirror:
    """Rank 0 of ``size`` ranks who all send the same."""

    rank, active = 0, True

    def __init__(self, size: int) -> None:
        self.size = size
        self.seconds = 0.0

    def generation(self) -> object:
        return Mirror

    def check_optimizer(self, optimizer: object) -> None:
        """Any will do."""

    def start(self, request: Request, name: str) -> _Done:
        begin, given = time.perf_counter(), request.tensor
        if request.verb == "allreduce":
            result = given * self.size
        elif request.verb == "allgather":
            result = given.repeat(self.size, *[1] * (given.dim() - 1))
        else:  # its own part, from every rank
            result = given.view(self.size, -1)[0].repeat(self.size)
        self.seconds += time.perf_counter() - begin
        return _Done(result)


def give_back() -> None:
    """What is free goes back to the system: it is nobody's memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def resident(what: str) -> int:
    """Bytes: ``VmRSS``, now, or ``VmHWM``, the most since :func:`forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {what}")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


class Rank:
    """A network and its compressor, which takes one step after the other."""

    def __init__(self, method: str, millions: int, ranks: int) -> None:
        layers = [torch.nn.Parameter(torch.randn(LAYER) * 0.02) for _ in range(millions)]
        self.layers, self.noise = layers, torch.randn(layers[0].numel() + SLACK) * 0.01
        for layer in layers:
            layer.grad = torch.ones_like(layer)
        self.entries = sum(layer.numel() for layer in layers)
        give_back()
        self.before = resident("VmRSS")
        self.mirror, self.steps = Mirror(ranks), 0
        self.compression = METHODS[method]([(f"layer{i}", p) for i, p in enumerate(layers)], collectives=self.mirror)

    def step(self) -> float:
        """The seconds that it took, without the mirror's."""
        self.steps += 1
        for i, layer in enumerate(self.layers):
            assert layer.grad is not None
            offset = (self.steps * 10007 + i) * 2654435761 % SLACK
            layer.grad.copy_(self.noise[offset : offset + layer.numel()].view(LAYER))
        begin, idle = time.perf_counter(), self.mirror.seconds
        tickets = [self.compression.compress(layer.grad) for layer in reversed(self.layers)]  # type: ignore[arg-type]
        for payload, ticket in tickets:
            self.compression.decompress(payload, ticket)
        return time.perf_counter() - begin - (self.mirror.seconds - idle)


def measure(method: str, millions: int, ranks: int, steps: int) -> dict[str, Any]:
    """In a process of its own, or memory that an earlier measurement has freed would be taken for none."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    Rank(method, 1, ranks).step()
    rank = Rank(method, millions, ranks)
    for _ in range(3):
        rank.step()
    give_back()
    forget_peak()
    seconds = [rank.step() for _ in range(steps)]
    peak = resident("VmHWM")
    give_back()
    held = resident("VmRSS")
    before, entries = rank.before, rank.entries
    return {
        "method": method,
        "entries": entries,
        "ranks": ranks,
        "ms": 1e3 * statistics.median(seconds),
        "ms_spread": [1e3 * min(seconds), 1e3 * max(seconds)],
        "ns_per_entry": 1e9 * statistics.median(seconds) / entries,
        "held_bytes_per_entry": (held - before) / entries,
        "peak_bytes_per_entry": (peak - before) / entries,
    }


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    header = ["method", "entries", "ranks", "ms", "ns an entry", "held, bytes an entry", "peak"]
    lines = [
        [
            row["method"],
            f"{row['entries']:,}",
            str(row["ranks"]),
            f"{row['ms']:,.2f} ({row['ms_spread'][0]:,.2f} to {row['ms_spread'][1]:,.2f})",
            f"{row['ns_per_entry']:.2f}",
            f"{row['held_bytes_per_entry']:.2f}",
            f"{row['peak_bytes_per_entry']:.2f}",
        ]
        for row in rows
    ]
    return table.markdown(header, lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", type=texts, default=list(METHODS), help=f"by default all: {','.join(METHODS)}")
    parser.add_argument("--millions", type=_counts, default=[1, 10, 100], help="of entries, as 1,10,200")
    parser.add_argument("--ranks", type=_counts, default=[4], help="as 2,4,8")
    parser.add_argument("--steps", type=int, default=7, help="measured, after three others")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if unknown := set(args.methods) - set(METHODS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(METHODS)}")
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    rows: list[dict[str, Any]] = []
    spawn = multiprocessing.get_context("spawn")
    for method in args.methods:
        for millions in args.millions:
            for ranks in args.ranks:
                with ProcessPoolExecutor(1, spawn) as process:
                    rows.append(process.submit(measure, method, millions, ranks, args.steps).result())
                print(f"{method}, {millions} M, {ranks} ranks: {rows[-1]['ms']:.2f} ms", file=sys.stderr, flush=True)
    print(markdown(rows))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    return 0


def _counts(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",")]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return counts


if __name__ == "__main__":
    sys.exit(main())
