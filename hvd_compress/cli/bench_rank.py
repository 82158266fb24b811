"""A rank of ``hvd-compress bench``: measures methods one after the other; rank 0 writes a line of JSON for each."""

import argparse
import ctypes
import json
import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from . import shapes
from .ranks import HOSTS, Horovod, nodes_of, start
from .shapes import Named
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
    parser.add_argument("--ranks-per-node", type=int, default=1, help="above 1, compressors get nodes=")
    parser.add_argument("--result", type=Path, required=True)
    return parser.parse_args()


class Bench:
    """Steps of a model without computation, each begun together on all ranks.

    Args:
        ranks: this process's rank.
        named: the model's parameters.
        steps: number of measured steps, fewer if they take more than ``seconds``, but at least 3.
        seconds: for the steps of a method.
        per_node: ranks of a node, which share its link.
    """

    def __init__(self, ranks: Horovod, named: Sequence[Named], steps: int, seconds: float, per_node: int = 1) -> None:
        self.ranks, self.named, self.steps, self.seconds, self.per_node = ranks, named, steps, seconds, per_node

    def replica(self, momentum: float = 0.0) -> tuple[Synthetic, torch.optim.Optimizer]:
        """A model and its optimizer."""
        model = Synthetic(self.named, self.ranks.rank)
        return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=momentum, fused=True)

    def alone(self, momentum: float = 0.0) -> dict[str, float]:
        """Backward and update without exchange: of the slowest rank, and the processor's time, in ms."""
        model, optimizer = self.replica(momentum)

        def step() -> None:
            model().backward()
            optimizer.step()
            optimizer.zero_grad()

        found = self.timed(step)
        cpu = self.ranks.gather(statistics.median(cpu for _, cpu in found))
        return {
            "alone_ms": statistics.median(self._slowest([seconds for seconds, _ in found])),
            "alone_processor_ms": 1e3 * statistics.mean(cpu),
        }

    def measure(self, model: Synthetic, optimizer: Any, compression: Any) -> dict[str, Any]:
        """One method's figures, in ms: the steps of the slowest rank; the processor's time of a step, and that in the
        compressor, means over ranks. ``compression``: see :meth:`hvd_compress.cli.ranks.Horovod.wrap`."""
        host = self.ranks
        module, optimizer = host.wrap(model, optimizer, compression)

        def step() -> None:
            module().backward()
            host.synchronize(optimizer)
            host.update(optimizer)
            optimizer.zero_grad()

        found = self.timed(step)
        stats = compression.stats() if hasattr(compression, "stats") else None
        # Not by numpy(), which torch does not require.
        weights = [zlib.crc32(ctypes.string_at(p.data_ptr(), p.nbytes)) for p in model.parameters()]
        processor, last = statistics.median(cpu for _, cpu in found), stats["last"] if stats else {}
        sent_of_rank = last.get("wire_bytes", 0.0), last.get("inside_bytes", 0.0)
        everyone = host.gather((weights, processor, stats and stats["compress_ms"], sent_of_rank))
        # Of the link of rank 0's node, and of rank 0 itself.
        sent_bytes = sum(theirs[0] for *_, theirs in everyone[: self.per_node])
        steps = self._slowest([seconds for seconds, _ in found])
        return {
            "step_ms": statistics.median(steps),
            "step_ms_spread": [min(steps), max(steps)],
            "steps_ms": steps,
            "processor_ms": 1e3 * statistics.mean(cpu for _, cpu, *_ in everyone),
            "compress_ms": statistics.mean(ms or 0.0 for _, _, ms, _ in everyone),
            "sent_bytes": stats and sent_bytes,
            "inside_bytes": sent_of_rank[1],
            "replicas_equal": all(theirs == weights for theirs, *_ in everyone),
        }

    def timed(self, step: Callable[[], None]) -> list[tuple[float, float]]:
        """Seconds, and seconds of the processor, of each step."""
        found, begin = [], time.monotonic()
        for number in range(WARMUP + self.steps):
            late = number >= WARMUP + 3 and time.monotonic() - begin > self.seconds
            if any(self.ranks.gather(late)):  # also a barrier
                break
            clock, cpu = time.perf_counter(), time.process_time()
            step()
            found.append((time.perf_counter() - clock, time.process_time() - cpu))
        return found[WARMUP:]

    def _slowest(self, seconds: list[float]) -> list[float]:
        """The steps of the slowest rank, in ms."""
        return [1e3 * max(ranks) for ranks in zip(*self.ranks.gather(seconds), strict=True)]


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    host = start(args.host, args.store, nodes=args.ranks_per_node > 1)
    bench = Bench(host, shapes.named(args.model), args.steps, args.seconds, args.ranks_per_node)
    nodes = nodes_of(host.size, args.ranks_per_node)
    lines: list[dict[str, Any]] = [{"ranks": host.size, **bench.alone()}]
    for method in args.methods:
        _append(args.result, host, lines.pop())
        model, optimizer = bench.replica()
        compression: Any = method if method == "fp16" else None
        if method not in BASELINES:
            compression = METHODS[method].build(model.named_parameters(), nodes=nodes)
        row = {"method": method, **bench.measure(model, optimizer, compression)}
        if method in BASELINES:
            row["sent_bytes"] = sent(messages(method, [shape for _, shape in bench.named], None, host.size), host.size)
        lines.append(row)
    _append(args.result, host, lines.pop())
    host.close()


def _append(file: Path, host: Horovod, line: dict[str, Any]) -> None:
    if host.rank == 0:
        with file.open("a") as stream:
            stream.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
