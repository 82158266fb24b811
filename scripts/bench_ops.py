#!/usr/bin/env python3
"""Times the operators against memory bandwidth and against the obvious torch code, all in the same run.

    python scripts/bench_ops.py --device cpu --numel 25000000 --threads 2

GB/s counts the bytes that have to cross memory (zeroing the gradient is not counted); "of copy" is its share of what
``b.copy_(a)`` reaches on tensors of this size; "torch / ours" is how many times longer torch takes for the same work,
with ``torch.topk`` over the whole tensor (- where no such code is timed); "wrong" counts results that differ from
hvd_compress/reference: if any does, the exit status is 1. "due": with the residual's part of the last ``put``, as IWP
and FFT do it in every step; "at once": a ``put`` that leaves nothing due, as the other methods' do. Last, the three in
turn, as in a step, for what ``take`` and ``put`` take together in terms of ``accumulate_select``.
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from hvd_compress import ops, reference
from hvd_compress.reference import BLOCK

B = TypeVar("B", bound="Bench")


class Bench:
    def __init__(self, device: str, numel: int, repeats: int) -> None:
        self.device, self.n, self.repeats, self.wrong = device, numel, repeats, 0
        self.blocks = -(-numel // BLOCK)
        a, b = self.random(numel), self.random(numel)
        self.copy = 8 * numel / self.time(lambda: b.copy_(a)) / 1e9

    def random(self, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(n, device=self.device, generator=torch.Generator(self.device).manual_seed(n)).to(dtype)

    def time(
        self, function: Callable[[], object], repeats: int = 0, before: Callable[[], object] | None = None
    ) -> float:
        """The median of seconds a call takes; what ``before`` does each time is not counted."""
        times = []
        for _ in range(repeats or self.repeats):
            if before is not None:
                before()
            self.wait()
            start = time.perf_counter()
            function()
            self.wait()
            times.append(time.perf_counter() - start)
        return sorted(times)[len(times) // 2]

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def row(self, name: str, seconds: float, size: float, torch_seconds: float | None, wrong: int) -> None:
        ratio = "-" if torch_seconds is None else f"{torch_seconds / seconds:.1f}"
        rate = size / seconds / 1e9
        share = rate / self.copy
        self.wrong += wrong
        print(f"| {name} | {seconds * 1e3:.2f} | {rate:.1f} | {share:.0%} | {ratio} | {wrong} |", flush=True)

    def accumulate_select(
        self,
        name: str,
        dtype: torch.dtype,
        each: int,
        ranks: int,
        explore: int,
        velocity: bool,
        weighted: bool = True,
        means: bool = False,
        due: bool = False,
    ) -> None:
        """``each`` slots a block, dealt one by one to ``ranks``; each = 0 accumulates only."""
        padded = self.blocks * BLOCK
        grad, residual = self.random(self.n, dtype), self.random(padded)
        weight = self.random(self.n, dtype) if weighted else None
        residual[self.n :] = 0
        momentum = self.random(padded) if velocity else None
        floor = torch.tensor([1e-3], device=self.device)
        offsets = torch.zeros(max(1, self.blocks * each // ranks + 1), dtype=torch.uint8, device=self.device)
        invalid = torch.zeros(1, dtype=torch.int32, device=self.device)
        apart = torch.zeros(self.blocks, device=self.device) if means else None
        tensors = [grad, residual, weight, momentum, floor, offsets, invalid, apart]
        numbers: tuple[object, ...] = (0.5, 0.9, each * self.blocks, 0, 0, 1, ranks, 0, 1234, explore)
        slots, picks, segments = self.slots(each if due else 0)
        sent, lost = self.random(slots), self.random(slots) * 1e-3
        where = reference.positions(picks, segments, 0)
        if due:
            numbers = (*numbers, picks, sent, lost, slots, 0, 0)

        mine = [None if tensor is None else tensor.clone() for tensor in tensors]
        wanted = [None if tensor is None else tensor.clone() for tensor in tensors]
        ops.accumulate_select(*mine, *numbers)  # type: ignore[arg-type]
        reference.accumulate_select(*wanted, *numbers)  # type: ignore[arg-type]
        wrong = sum(int((a != b).sum()) for a, b in zip(mine, wanted, strict=True) if a is not None and b is not None)
        seconds = self.time(lambda: ops.accumulate_select(*tensors, *numbers))  # type: ignore[arg-type]

        def obvious() -> None:
            flat = residual[: self.n]
            if due:
                residual[where] = lost
                if momentum is not None:
                    momentum[where] = 0.0
            step = grad.float() * 0.5 if momentum is None else momentum[: self.n].mul_(0.9).add_(grad, alpha=0.5)
            if apart is not None:
                whole = step[: self.n // BLOCK * BLOCK].view(-1, BLOCK)
                mean = whole.mean(1)
                apart[: len(mean)] += mean
                whole -= mean[:, None]
            flat += step
            if apart is None:
                grad.zero_()
            if each:
                score = flat.abs() if weight is None else flat.abs() / (weight.float().abs() + floor)
                torch.topk(score, max(1, self.blocks * each // ranks))

        read_weight = weighted and each >= ranks  # then this rank leads in every block
        size = self.n * (8 + grad.element_size() * (1 + read_weight) + 8 * velocity) + slots * 9
        self.row(f"accumulate_select {name}{', due' * due}", seconds, size, self.time(obvious, 3), wrong)

    def select(self, name: str, each: int, ranks: int, explore: int) -> None:
        """``each`` slots a block, dealt one by one to ``ranks``; this rank leads in every block."""
        score = self.random(self.blocks * BLOCK).abs()
        offsets = torch.zeros(self.blocks * each // ranks + 1, dtype=torch.uint8, device=self.device)
        wanted = offsets.clone()
        numbers = (each * self.blocks, 0, 0, 1, ranks, 0, 1234, explore)
        ops.select(score, offsets, *numbers)
        reference.select(score, wanted, *numbers)
        wrong = int((offsets != wanted).sum())
        seconds = self.time(lambda: ops.select(score, offsets, *numbers))
        torch_seconds = self.time(lambda: torch.topk(score, self.blocks * each // ranks), 3)
        self.row(f"select {name}", seconds, 4 * score.numel(), torch_seconds, wrong)

    def slots(self, each: int) -> tuple[int, Tensor, Tensor]:
        """``each`` slots a block: their number, where they are, and the operators' table."""
        slots = each * self.blocks
        offsets = torch.randint(0, BLOCK, (slots,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
        return slots, offsets.to(self.device), torch.tensor([[0, self.blocks, 0, slots]], device=self.device)

    def take(self, each: int) -> None:
        """``each`` slots a block. The obvious code reaches the same entries by flat int64 indices."""
        slots, offsets, segments = self.slots(each)
        residual = self.random(self.blocks * BLOCK)
        mine = residual.clone()
        values, wanted = (torch.empty(slots, device=self.device) for _ in range(2))
        indices = reference.positions(offsets, segments, 0)

        def again() -> None:
            mine.copy_(residual)

        ops.take(mine, offsets, segments, values, 0)
        reference.take(mine, offsets, segments, wanted, 0)
        wrong = int((values != wanted).sum())
        seconds = self.time(lambda: ops.take(mine, offsets, segments, values, 0), before=again)
        torch_seconds = self.time(lambda: torch.index_select(mine, 0, indices, out=values), before=again)
        self.row(f"take {each} of 256", seconds, slots * (1 + 4 + 4), torch_seconds, wrong)

    def put(self, each: int, velocity: bool = False, means: bool = False, at_once: bool = False) -> None:
        """The inverse of :meth:`take`."""
        slots, offsets, segments = self.slots(each)
        padded = self.blocks * BLOCK
        residual, grad = self.random(padded), torch.zeros(self.n, device=self.device)
        momentum = torch.ones(padded, device=self.device) if velocity else None
        indices = reference.positions(offsets, segments, 0).clamp(max=self.n - 1)
        mine = residual.clone()

        def again() -> None:
            mine.copy_(residual)
            grad.zero_()

        mean, lost = self.random(slots), self.random(slots) * 1e-3 if at_once else None
        whole = self.random(self.blocks) if means else None
        rest = (offsets, segments, mean, lost, 0, 0.25, whole)
        others = [tensor if tensor is None else tensor.clone() for tensor in (grad, residual, momentum)]
        ops.put([grad], mine, momentum, *rest)
        reference.put([others[0]], others[1], others[2], *rest)  # type: ignore[list-item, arg-type]
        got = (grad, mine, momentum)
        wrong = sum(int((a != b).sum()) for a, b in zip(got, others, strict=True) if a is not None and b is not None)
        seconds = self.time(lambda: ops.put([grad], mine, momentum, *rest), before=again)

        def obvious_put() -> None:
            if whole is not None:
                grad.copy_((whole * 0.25).repeat_interleave(BLOCK)[: self.n])
                grad[indices] += mean * 0.25
            else:
                grad[indices] = mean * 0.25
            if lost is not None:
                mine[indices] = lost
            if at_once and momentum is not None:
                momentum[indices] = 0.0

        size = slots * (1 + 8 + (8 + 4 * velocity) * at_once) + 4 * self.n * means
        name = f"put {each} of 256{', velocity' * velocity}{', means' * means}{', at once' * at_once}"
        self.row(name, seconds, size, self.time(obvious_put, before=again), wrong)

    def in_turn(self, name: str, each: int, ranks: int, velocity: bool = False, means: bool = False) -> None:
        """Prints how long ``take`` and ``put`` are, of the accumulate_select before them: the median of all rounds."""
        padded = self.blocks * BLOCK
        grad, residual, weight = self.random(self.n), self.random(padded), self.random(self.n)
        momentum = self.random(padded) if velocity else None
        floor, invalid = torch.tensor([1e-3], device=self.device), torch.zeros(1, dtype=torch.int32, device=self.device)
        apart = torch.zeros(self.blocks, device=self.device) if means else None
        own = torch.zeros(self.blocks * each // ranks + 1, dtype=torch.uint8, device=self.device)
        slots, picks, segments = self.slots(each)
        values, mean, lost = self.random(slots), self.random(slots), self.random(slots) * 1e-3
        tensors = (grad, residual, weight, momentum, floor, own, invalid, apart)
        numbers = (0.5, 0.9, slots, 0, 0, 1, ranks, 0, 1, 0, picks, mean, lost, slots, 0, 0)
        ratios = []
        for _ in range(self.repeats):
            whole = self.time(lambda: ops.accumulate_select(*tensors, *numbers), 1)
            parts = self.time(lambda: ops.take(residual, picks, segments, values, 0), 1)
            parts += self.time(lambda: ops.put([grad], residual, None, picks, segments, mean, None, 0, 0.25, apart), 1)
            ratios.append(parts / whole)
        ratios.sort()
        print(f"- {name}: {ratios[len(ratios) // 2]:.0%} ({ratios[0]:.0%} to {ratios[-1]:.0%})", flush=True)


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
    print("| operator | ms | GB/s | of copy | torch / ours | wrong |\n|---|---|---|---|---|---|")
    every = 2**32
    bench.accumulate_select("fp32, 1 of 4 slots", torch.float32, 4, 4, 0, False, due=True)
    bench.accumulate_select("fp32, 1 of 4 slots", torch.float32, 4, 4, 0, False)
    bench.accumulate_select("fp32, 1 of 4 slots, velocity", torch.float32, 4, 4, 0, True)
    bench.accumulate_select("fp32, 1 of 4 slots, explored", torch.float32, 4, 4, every, False)
    bench.accumulate_select("fp32, 1 of 4 slots, means", torch.float32, 4, 4, 0, False, means=True)
    bench.accumulate_select("fp32, 1 of 4 slots, velocity, means", torch.float32, 4, 4, 0, True, means=True, due=True)
    bench.accumulate_select("fp32, 4 slots", torch.float32, 4, 1, 0, False)
    bench.accumulate_select("fp32, 16 slots", torch.float32, 16, 1, 0, False)
    bench.accumulate_select("fp32, no slots", torch.float32, 0, 1, 0, False)
    bench.accumulate_select("bf16, 1 of 4 slots", torch.bfloat16, 4, 4, 0, False)
    bench.accumulate_select("fp16, 1 of 4 slots", torch.float16, 4, 4, 0, False)
    bench.accumulate_select("fp32, 1 of 4 slots, no weight", torch.float32, 4, 4, 0, False, False)
    bench.select("1 of 4 slots", 4, 4, 0)
    bench.select("1 of 4 slots, explored", 4, 4, every)
    bench.take(4)
    bench.put(4)
    bench.put(4, means=True)
    bench.put(4, at_once=True)
    bench.put(4, velocity=True, at_once=True)
    print("\ntake and put, of the accumulate_select before them, which does what the last put has left due:\n")
    bench.in_turn("leading 1 of 4 slots", 4, 4)
    bench.in_turn("leading 4 slots", 4, 1)
    bench.in_turn("leading 1 of 4 slots, velocity", 4, 4, velocity=True)
    bench.in_turn("leading 1 of 4 slots, means", 4, 4, means=True)
    bench.in_turn("leading 1 of 4 slots, velocity, means", 4, 4, velocity=True, means=True)
    return 1 if bench.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
