#!/usr/bin/env python3
"""Time the operators against memory bandwidth and against plain torch code, all in the same run.

    python scripts/lab/bench_ops.py --device cpu --numel 25000000 --threads 2

GB/s counts the bytes that have to cross memory (zeroing the gradient is not counted); "of copy" is its share of what
``b.copy_(a)`` reaches on tensors of this size; "torch / ours" is how many times longer plain torch code takes for
accumulating and ``torch.topk`` over the whole tensor, for indexing, or for a matrix product; "wrong" counts entries
that differ from hvd_compress/reference: if any does, the exit status is 1. "transform":
into Walsh-Hadamard coefficients and back, as DeMo does it. With one thread on a CPU, times are
the thread's CPU time: other processes do not count.

``ATEN_CPU_CAPABILITY=avx2`` in the environment limits torch and the operators to AVX2, on every processor.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.benchmark import Timer
from torch.utils.benchmark import timer as wall

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experiments"))
import table

from hvd_compress import ops, reference
from hvd_compress.reference import BLOCK

B = TypeVar("B", bound="Bench")


class Bench:
    def __init__(self, device: str, numel: int, repeats: int) -> None:
        self.device, self.n, self.repeats, self.wrong = device, numel, repeats, 0
        self.rows: list[dict[str, str]] = []
        self.blocks = -(-numel // BLOCK)
        a, b = self.random(numel), self.random(numel)
        self.copy = 8 * numel / self.time(lambda: b.copy_(a)) / 1e9

    def random(self, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(n, device=self.device, generator=torch.Generator(self.device).manual_seed(n)).to(dtype)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def time(
        self, function: Callable[[], object], repeats: int = 0, before: Callable[[], object] = lambda: None
    ) -> float:
        """The median of seconds that a call takes; ``before`` runs before each call and is not counted."""
        threads = torch.get_num_threads()
        timer = Timer("function()", "before()", globals={"function": function, "before": before}, num_threads=threads,
                      timer=time.thread_time if self.device == "cpu" and threads == 1 else wall)  # fmt: skip
        times = sorted(timer.timeit(1).median for _ in range(repeats or self.repeats))
        return times[len(times) // 2]

    def differing(self, operator: str, arguments: dict[str, Any]) -> int:
        """Entries of all tensors that the operator and its reference leave different."""
        mine, wanted = ({name: _cloned(value) for name, value in arguments.items()} for _ in range(2))
        getattr(ops, operator)(**mine)
        getattr(reference, operator)(**wanted)
        return sum(int((a != b).sum()) for a, b in zip(_tensors(mine), _tensors(wanted), strict=True))

    def row(
        self, name: str, operator: str, arguments: dict[str, Any], byte_count: float, other: Callable[[], object],
        before: Callable[[], object] = lambda: None, column: str = "torch / ours", wrong: int | None = None
    ) -> None:  # fmt: skip
        """A row beside plain torch code, or another function, for the same work."""
        wrong = self.differing(operator, arguments) if wrong is None else wrong
        seconds = self.time(lambda: getattr(ops, operator)(**arguments), before=before)
        rate = byte_count / seconds / 1e9
        self.rows.append(
            {
                "operator": f"{operator} {name}",
                "ms": f"{seconds * 1e3:.3f}",
                "GB/s": f"{rate:.1f}",
                "of copy": f"{rate / self.copy:.0%}",
                column: f"{self.time(other, 1 if column == 'torch / ours' else 0, before) / seconds:.2f}",
                "wrong": str(wrong),
            }
        )
        self.wrong += wrong

    def slots(self, each: int) -> tuple[int, Tensor, Tensor]:
        """``each`` slots a block: their number, their indices, and the operators' table of pieces."""
        slots = each * self.blocks
        indices = torch.randint(0, BLOCK, (slots,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
        return slots, indices.to(self.device), torch.tensor([[0, self.blocks, 0, slots]], device=self.device)

    def accumulate(
        self, each: int, ranks: int, velocity: bool = False, weight: bool = True, means: bool = False,
        transform: bool = False
    ) -> dict[str, Any]:  # fmt: skip
        """The arguments of ``accumulate_select``, whose slots are dealt one by one to ``ranks``; with ``each`` = 0 it
        accumulates only."""
        padded, grad = self.blocks * BLOCK, self.random(self.n)
        arguments = {
            "grads": [grad],
            "residual": self.random(padded),
            "weights": [grad.clone()] if weight else [],
            "velocity": self.random(padded) if velocity else None,
            "pieces": self.slots(each)[2],
            "floors": torch.full((1,), 1e-3, device=self.device),
            "indices": self.zeros(max(1, self.blocks * each // ranks + 1), dtype=torch.uint8),
            "invalid": self.zeros(1, dtype=torch.int32),
            "touched": self.zeros(1, dtype=torch.int32),
            "block_means": self.zeros(self.blocks) if means else None,
            "scale": 0.5,
            "momentum": 0.9,
            "decay": 0.999 if transform else 1.0,
            "transform": transform,
            **ops.Draw(phase=0, run=1, ranks=ranks, position=0, key=1234, explore=0)._asdict(),
        }
        arguments["residual"][self.n :] = 0
        if velocity:
            arguments["velocity"][self.n :] = 0
        return arguments

    def accumulate_select(self, name: str, each: int, ranks: int, **options: Any) -> None:
        arguments = self.accumulate(each, ranks, **options)
        (grad,), residual, weights = arguments["grads"], arguments["residual"], arguments["weights"]

        def plain() -> None:
            flat = residual[: self.n].add_(grad, alpha=0.5)
            if each:
                score = flat.abs() / (weights[0].abs() + 1e-3) if weights else flat.abs()
                torch.topk(score, max(1, self.blocks * each // ranks))

        reads_weight = bool(weights) and each >= ranks  # then this rank leads in every block
        entry = 8 + 4 * (1 + reads_weight) + 8 * options.get("velocity", False)
        self.row(name, "accumulate_select", arguments, self.n * entry, plain)

    def gather(self, each: int) -> None:
        """The plain code reaches the same entries by flat int64 indices."""
        slots, indices, pieces = self.slots(each)
        residual, fresh, values = self.random(self.blocks * BLOCK), self.random(self.blocks * BLOCK), self.zeros(slots)
        arguments = {"residual": residual, "indices": indices, "pieces": pieces, "values": values, "phase": 0}
        where = reference.flat_positions(indices, pieces, 0)

        def plain() -> None:
            torch.index_select(residual, 0, where, out=values)

        self.row(f"{each} of 256", "gather", arguments, slots * (1 + 4 + 4), plain, lambda: residual.copy_(fresh))

    def scatter(self, each: int, velocity: bool = False, means: bool = False, transform: bool = False) -> None:
        """The inverse of :meth:`gather`."""
        slots, indices, pieces = self.slots(each)
        residual, fresh, grad = self.random(self.blocks * BLOCK), self.random(self.blocks * BLOCK), self.zeros(self.n)
        momentum, block_means = torch.ones_like(residual) if velocity else None, self.random(self.blocks)
        mean, error = self.random(slots), self.random(slots) * 1e-3
        arguments = {
            "grads": [grad], "residual": residual, "velocity": momentum, "indices": indices, "pieces": pieces,
            "mean": mean, "quantization_error": error, "phase": 0, "scale": 0.25,
            "block_means": block_means if means else None, "transform": transform, "sign": transform,
        }  # fmt: skip
        where = reference.flat_positions(indices, pieces, 0).clamp(max=self.n - 1)

        def plain() -> None:
            grad[where] = mean * 0.25
            residual[where] = error

        def before() -> None:
            residual.copy_(fresh)
            grad.zero_()

        whole = means or transform  # all of the gradient is written
        byte_count = slots * (1 + 8 + 8 + 4 * velocity) + 4 * self.n * whole - 4 * slots * transform
        options = {"velocity": velocity, "means": means, "transform, sign": transform}
        name = ", ".join([f"{each} of 256", *(option for option, given in options.items() if given)])
        self.row(name, "scatter", arguments, byte_count, plain, before)


def _cloned(value: Any) -> Any:
    if isinstance(value, list):
        return [_cloned(part) for part in value]
    return value.clone() if isinstance(value, Tensor) else value


def _tensors(arguments: dict[str, Any]) -> list[Tensor]:
    parts = [part for value in arguments.values() for part in (value if isinstance(value, list) else [value])]
    return [part for part in parts if isinstance(part, Tensor)]


def started(kind: type[B], description: str | None) -> B:
    """A bench of this kind as the command line asks for it; prints what runs where."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--numel", type=int, default=25_000_000)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=11)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    bench = kind(args.device, args.numel, args.repeats)
    compiled = ops.COMPILED_CUDA if args.device == "cuda" else ops.COMPILED
    cpu = f"CPU with {ops.CPU_CAPABILITY}, {args.threads} thread{'s' * (args.threads > 1)}"
    where = torch.cuda.get_device_name() if args.device == "cuda" else cpu
    print(f"{args.numel:,} entries, {where}, torch {torch.__version__}, compiled: {compiled}", end=", ")
    print(f"copy {bench.copy:.1f} GB/s\n")
    return bench


def main() -> int:
    bench = started(Bench, __doc__)
    bench.accumulate_select("no slots", 0, 1)
    bench.accumulate_select("1 of 4 slots", 4, 4)
    bench.accumulate_select("1 of 4 slots, velocity", 4, 4, velocity=True)
    bench.accumulate_select("1 of 4 slots, means", 4, 4, means=True)
    bench.accumulate_select("4 slots", 4, 1)
    bench.accumulate_select("4 of 16 slots", 16, 4, weight=False)
    bench.accumulate_select("4 of 16 slots, transform", 16, 4, weight=False, transform=True)
    bench.gather(4)
    bench.scatter(4)
    bench.scatter(4, means=True)
    bench.scatter(4, velocity=True)
    bench.scatter(16, transform=True)
    print(table.markdown(bench.rows))
    return 1 if bench.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
