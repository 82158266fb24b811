#!/usr/bin/env python3
"""What one rank's compressor costs as the network and the number of ranks grow: time per step, and memory.

    bench_growth.py --methods iwp,topk --millions 1,10,100,200 --ranks 4 --json FILE.jsonl/NAME
    bench_growth.py --methods iwp --millions 25 --ranks 2,4,8,64

One process and one thread stand for a rank. The other ranks are simulated as sending what it sends, so that results
have the sizes of a real step and nothing competes for the processor; the simulation's time is not counted, and there
is no network. Networks are layers of 1000 by 1000; gradients are normal, and new in every step.

"ms" is the time of all `compress` and `decompress` calls of a step, median.
"held" is the memory in bytes per entry that the compressor has between steps beyond weights and gradients, "peak" the
maximum during a step: resident memory by /proc/self/status, after a small compressor has loaded all code, and after
free memory was returned to the system.
"""

import ctypes
import gc
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experiments"))

import table
import torch
from experiment import metrics
from experiment.comparison import texts
from experiment.compressors import METHODS
from experiment.files import script_parser
from experiment.result_file import run_path, write_run

from hvd_compress.carriers.mirror import Mirror

LAYER = 1000, 1000
SLACK = 1 << 20


def resident(what: str) -> int:
    """Bytes of ``VmRSS``, now, or ``VmHWM``, the maximum since the peak was cleared; after free memory was returned."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{what}:"))


def new_gradients(layers: Iterable[torch.nn.Parameter], noise: torch.Tensor, step: int) -> None:
    """Fills the gradients of layers with other parts of the noise in every step."""
    for number, layer in enumerate(layers):
        offset = (step * 10007 + number) * 2654435761 % SLACK
        layer.grad.copy_(noise[offset : offset + layer.numel()].view(LAYER))


def costs(rank: Any, entries: int, steps: int, before: int) -> dict[str, float]:
    """Milliseconds of ``rank.step()``, and bytes of memory an entry, after ``before`` steps that are not counted."""
    for _ in range(before):
        rank.step()
    resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now
    seconds = [rank.step() for _ in range(steps)]
    peak, held = resident("VmHWM"), resident("VmRSS")
    return {
        "ms": 1e3 * statistics.median(seconds),
        "held_bytes_per_entry": (held - rank.before) / entries,
        "peak_bytes_per_entry": (peak - rank.before) / entries,
    }


class Rank:
    """A network and its compressor, of a class and options of it."""

    def __init__(self, kind: Any, millions: int, ranks: int, **options: Any) -> None:
        layers = [torch.nn.Parameter(torch.randn(LAYER) * 0.02) for _ in range(millions)]
        self.layers, self.noise = layers, torch.randn(layers[0].numel() + SLACK) * 0.01
        for layer in layers:
            layer.grad = torch.ones_like(layer)
        self.before = resident("VmRSS")
        self.mirror, self.steps = Mirror(ranks), 0
        named = [(f"layer{i}", p) for i, p in enumerate(layers)]
        self.compression = kind(named, collectives=self.mirror, **options)

    def step(self) -> float:
        """The seconds of one step, without the mirror's."""
        self.steps += 1
        new_gradients(self.layers, self.noise, self.steps)
        begin, idle = time.perf_counter(), self.mirror.seconds
        for payload, context in [self.compression.compress(layer.grad) for layer in reversed(self.layers)]:
            self.compression.decompress(payload, context)
        return time.perf_counter() - begin - (self.mirror.seconds - idle)


def measure(method: str, millions: int, ranks: int, steps: int) -> dict[str, Any]:
    """In a process of its own: memory that an earlier measurement has freed could be reused."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    Rank(METHODS[method].kind, 1, ranks).step()
    rank = Rank(METHODS[method].kind, millions, ranks)
    entries = millions * LAYER[0] * LAYER[1]
    found = costs(rank, entries, steps, before=3)
    ms = found.pop("ms")
    return {
        "method": method,
        "entries": entries,
        "ranks": ranks,
        "ms": ms,
        "ns_per_entry": 1e6 * ms / entries,
        **found,
    }


def main() -> int:
    def counts(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    known = [name for name, method in METHODS.items() if method.kind]
    parser = script_parser(__doc__)
    parser.add_argument("--methods", type=texts, default=known, help=f"by default all: {','.join(known)}")
    parser.add_argument("--millions", type=counts, default=[1, 10, 100], help="of entries, as 1,10,200")
    parser.add_argument("--ranks", type=counts, default=[4], help="as 2,4,8")
    parser.add_argument("--steps", type=int, default=7, help="measured, after three others")
    parser.add_argument("--json", type=run_path, metavar="FILE.jsonl/NAME")
    args = parser.parse_args()
    if unknown := set(args.methods) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    rows: list[dict[str, Any]] = []
    for method in args.methods:
        for millions in args.millions:
            for ranks in args.ranks:
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                    rows.append(process.submit(measure, method, millions, ranks, args.steps).result())
    print(table.markdown([{k: f"{v:,.2f}" if isinstance(v, float) else str(v) for k, v in r.items()} for r in rows]))
    write_run(args.json, {"config": metrics.environment(), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
