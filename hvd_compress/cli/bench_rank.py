"""A rank of ``hvd-compress bench``: measures methods one after the other; rank 0 writes a line of JSON for each."""

import argparse
import ctypes
import json
import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import recipes
from ..engine.collectives import ring_bytes
from . import shapes
from .methods import BASELINES, METHODS
from .ranks import HOSTS, Horovod, LocalRank, launched, start
from .shapes import Named
from .synthetic import Synthetic

WARMUP = 2
SECONDS = 60.0  # for the steps of a method, but at least 3


@dataclass
class Bench:
    """Measures steps of a model without computation. All ranks begin each step together.

    Args:
        named: the model's parameters.
        steps: number of measured steps, fewer if they take more than ``seconds``, but at least 3.
        pause: of the model, in seconds (:class:`.synthetic.Synthetic`).
        per_node: ranks of a node, which share its link.
    """

    ranks: Horovod
    named: Sequence[Named]
    steps: int
    seconds: float = SECONDS
    pause: float = 0.0
    per_node: int = 1

    def replica(self, momentum: float = 0.0) -> tuple[Synthetic, torch.optim.Optimizer]:
        model = Synthetic(self.named, self.ranks.rank, pause=self.pause)
        return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=momentum, fused=True)

    def alone(self, momentum: float = 0.0) -> float:
        """The time of backward and update without exchange, of the slowest rank, in ms."""
        model, optimizer = self.replica(momentum)

        def step() -> None:
            model().backward()
            optimizer.step()
            optimizer.zero_grad()

        return statistics.median(self._slowest(self.timed(step)))

    def measure(
        self,
        model: Synthetic,
        optimizer: Any,
        compression: Any,
        coupling: Horovod | LocalRank | None = None,
        period: int = 1,
    ) -> dict[str, Any]:
        """The figures of one method. Times are in ms: the steps of the slowest rank; the longest step of a period; the
        time in the compressor without waiting, the mean over ranks. Bytes are those of the link of rank 0's node.

        Args:
            compression: see :meth:`hvd_compress.cli.ranks.Horovod.wrap`.
            coupling: an object to call from ``wrap`` to ``replicas`` in place of the host.
            period: steps between two exchanges; figures are means over them.
        """
        host, coupling = self.ranks, coupling or self.ranks
        module, optimizer = coupling.wrap(model, optimizer, compression)

        def step() -> None:
            module().backward()
            coupling.synchronize(optimizer)
            coupling.update(optimizer)
            optimizer.zero_grad()

        single = self._slowest(self.timed(step, period))
        stats: Any = compression.stats() if hasattr(compression, "stats") else {"compress_ms": 0.0, "last": {}}
        # Not by numpy(), which torch does not require.
        weights = [zlib.crc32(ctypes.string_at(p.data_ptr(), p.nbytes)) for p in coupling.replicas(model)]
        last = stats["last"]
        mine = weights, stats["compress_ms"] or 0.0, last.get("wire_bytes", 0.0), last.get("inside_bytes", 0.0)
        all_weights, compress, wire, inside = zip(*host.gather(mine), strict=True)
        periods = [single[i : i + period] for i in range(0, len(single), period)]
        return {
            "ranks": host.size,
            "entries": model.numel,
            "steps_ms": list(map(statistics.fmean, periods)),
            "longest_ms": statistics.median(map(max, periods)),
            "compress_ms": statistics.fmean(compress) / period,
            "sent_bytes": sum(wire[: self.per_node]) / period,
            "inside_bytes": inside[0] / period,
            "replicas_equal": all(theirs == weights for theirs in all_weights),
        }

    def timed(self, step: Callable[[], None], period: int = 1) -> list[float]:
        """The seconds of each step after the warm-up, in whole periods."""
        found, begin, warmup = [], time.monotonic(), max(WARMUP, period)
        for number in range(warmup + self.steps * period):
            if number % period == 0:  # within a period, ranks do not meet
                late = number >= warmup + 3 * period and time.monotonic() - begin > self.seconds
                if any(self.ranks.gather(late)):  # a barrier, too
                    break
            clock = time.perf_counter()
            step()
            found.append(time.perf_counter() - clock)
        return found[warmup:]

    def _slowest(self, seconds: list[float]) -> list[float]:
        return [1e3 * max(ranks) for ranks in zip(*self.ranks.gather(seconds), strict=True)]


def measure(bench: Bench, method: str, nodes: int | bool) -> dict[str, Any]:
    model, optimizer = bench.replica()
    known = METHODS[method]
    if method in BASELINES:
        found = bench.measure(model, optimizer, method if method == "fp16" else None)
        return {**found, "sent_bytes": ring_bytes("allreduce", known.width * model.numel, bench.ranks.size)}
    if known.local_steps > 1:
        local = recipes.low_bit(model, optimizer, known.local_steps)
        return bench.measure(model, optimizer, local.compression, LocalRank(lambda *_: local), known.local_steps)
    return bench.measure(model, optimizer, known.build(model.named_parameters(), nodes=nodes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", choices=HOSTS, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--methods", type=lambda text: text.split(";"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--ranks-per-node", type=int, default=1, help="above 1, compressors get nodes=")
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    per_node = args.ranks_per_node
    host = start(args.host, nodes=launched() // per_node if per_node > 1 and args.host == "horovod" else 0)
    bench = Bench(host, shapes.named(args.model), args.steps, per_node=per_node)
    if host.size % per_node:
        raise ValueError(f"{host.size} ranks are no full nodes of {per_node}")
    alone, nodes = bench.alone(), host.size // per_node if per_node > 1 else False
    for method in args.methods:
        row = {"method": method, "alone_ms": alone, **measure(bench, method, nodes)}
        if host.rank == 0:
            with args.result.open("a") as stream:
                stream.write(json.dumps(row) + "\n")
    host.close()


if __name__ == "__main__":
    main()
