"""A rank of ``hvd-compress bench``: measures methods one after the other; rank 0 writes a line of JSON for each."""

import argparse
import ctypes
import json
import statistics
import time
import zlib
from pathlib import Path
from typing import Any

import torch

from . import shapes
from .ranks import HOSTS, Horovod, start
from .synthetic import Synthetic
from .wire import BASELINES, METHODS, messages, sent

WARMUP = 2


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", choices=HOSTS, required=True)
    parser.add_argument("--store", default="", help="HOST:PORT at which DDP ranks meet, if the launcher names none")
    parser.add_argument("--model", required=True)
    parser.add_argument("--methods", type=lambda text: text.split(";"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="for the steps of a method, but at least 3")
    parser.add_argument("--result", type=Path, required=True)
    return parser.parse_args()


class Bench:
    """Steps of a model without computation, each begun together on all ranks."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.ranks = args, start(args.host, args.store)
        self.named = shapes.named(args.model)

    def alone(self) -> dict[str, float]:
        """Backward and update without exchange: of the slowest rank, and the processor's time, in ms."""
        model = Synthetic(self.named, self.ranks.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)

        def step() -> None:
            model().backward()
            optimizer.step()
            optimizer.zero_grad()

        found = self._steps(step)
        cpu = self.ranks.gather(statistics.median(cpu for _, cpu in found))
        return {
            "alone_ms": self._slowest([seconds for seconds, _ in found])[0],
            "alone_processor_ms": 1e3 * statistics.mean(cpu),
        }

    def measure(self, method: str) -> dict[str, Any]:
        """One method's figures, in ms: the steps of the slowest rank; the processor's time of a step, and that in the
        compressor, means over ranks."""
        host, model = self.ranks, Synthetic(self.named, self.ranks.rank)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
        compression: Any = method if method == "fp16" else None
        if method not in BASELINES:
            compression = METHODS[method].build(model.named_parameters())
        module, optimizer = host.wrap(model, optimizer, compression)

        def step() -> None:
            module().backward()
            host.synchronize(optimizer)
            host.update(optimizer)
            optimizer.zero_grad()

        found = self._steps(step)
        stats = compression.stats() if method not in BASELINES else None
        sizes = [shape for _, shape in self.named]
        formula = sent(messages(method, sizes, METHODS[method].density, host.size), host.size)
        # Not by numpy(), which torch does not require.
        weights = [zlib.crc32(ctypes.string_at(p.data_ptr(), p.nbytes)) for p in model.parameters()]
        everyone = host.gather((weights, statistics.median(cpu for _, cpu in found), stats and stats["compress_ms"]))
        step_ms, least, largest = self._slowest([seconds for seconds, _ in found])
        return {
            "method": method,
            "step_ms": step_ms,
            "step_ms_spread": [least, largest],
            "processor_ms": 1e3 * statistics.mean(cpu for _, cpu, _ in everyone),
            "compress_ms": statistics.mean(ms or 0.0 for *_, ms in everyone),
            "sent_bytes": stats["last"]["wire_bytes"] if stats else formula,
            "replicas_equal": all(theirs == weights for theirs, *_ in everyone),
        }

    def _steps(self, step: Any) -> list[tuple[float, float]]:
        """Seconds, and seconds of the processor, of each step."""
        found, begin = [], time.monotonic()
        for number in range(WARMUP + self.args.steps):
            late = number >= WARMUP + 3 and time.monotonic() - begin > self.args.seconds
            if any(self.ranks.gather(late)):  # also a barrier
                break
            clock, cpu = time.perf_counter(), time.process_time()
            step()
            found.append((time.perf_counter() - clock, time.process_time() - cpu))
        return found[WARMUP:]

    def _slowest(self, seconds: list[float]) -> tuple[float, float, float]:
        """Median, least and largest over the steps of the slowest rank, in ms."""
        slowest = [1e3 * max(ranks) for ranks in zip(*self.ranks.gather(seconds), strict=True)]
        return statistics.median(slowest), min(slowest), max(slowest)


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    bench = Bench(args)
    host: Horovod = bench.ranks
    first = {"ranks": host.size, **bench.alone()}
    lines = [first]
    for method in args.methods:
        _append(args.result, host, lines.pop())
        lines.append(bench.measure(method))
    _append(args.result, host, lines.pop())
    host.close()


def _append(file: Path, host: Horovod, line: dict[str, Any]) -> None:
    if host.rank == 0:
        with file.open("a") as stream:
            stream.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
