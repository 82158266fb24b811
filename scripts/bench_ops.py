#!/usr/bin/env python3
"""Times the operators against memory bandwidth and against the obvious torch code, all in the same run.

    python scripts/bench_ops.py --device cpu --numel 25000000 --threads 2

GB/s counts the bytes that have to cross memory (zeroing the gradient is not counted); "of copy" is its share of what
``b.copy_(a)`` reaches on tensors of this size; "torch / ours" is how many times longer torch takes for the same work,
with ``torch.topk`` over the whole tensor (- where no such code is timed); "wrong" counts results that differ from
hvd_compress/reference.py.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from hvd_compress import ops, reference
from hvd_compress.reference import BLOCK


class Bench:
    def __init__(self, device: str, numel: int, repeats: int) -> None:
        self.device, self.n, self.repeats = device, numel, repeats
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
        print(f"| {name} | {seconds * 1e3:.2f} | {rate:.1f} | {share:.0%} | {ratio} | {wrong} |", flush=True)

    def accumulate_select(
        self, name: str, dtype: torch.dtype, each: int, ranks: int, explore: int, velocity: bool
    ) -> None:
        """``each`` slots a block, dealt one by one to ``ranks``; each = 0 accumulates only."""
        padded = self.blocks * BLOCK
        grad, weight, residual = self.random(self.n, dtype), self.random(self.n, dtype), self.random(padded)
        residual[self.n :] = 0
        momentum = self.random(padded) if velocity else None
        floor = torch.tensor([1e-3], device=self.device)
        offsets = torch.zeros(max(1, self.blocks * each // ranks + 1), dtype=torch.uint8, device=self.device)
        invalid = torch.zeros(1, dtype=torch.int32, device=self.device)
        tensors = [grad, residual, weight, momentum, floor, offsets, invalid]
        numbers = (0.5, 0.9, each * self.blocks, 0, 0, 1, ranks, 0, 1234, explore)

        mine = [None if tensor is None else tensor.clone() for tensor in tensors]
        wanted = [None if tensor is None else tensor.clone() for tensor in tensors]
        ops.accumulate_select(*mine, *numbers)  # type: ignore[arg-type]
        reference.accumulate_select(*wanted, *numbers)  # type: ignore[arg-type]
        wrong = sum(int((a != b).sum()) for a, b in zip(mine, wanted, strict=True) if a is not None and b is not None)
        seconds = self.time(lambda: ops.accumulate_select(*tensors, *numbers))  # type: ignore[arg-type]

        def obvious() -> None:
            flat = residual[: self.n]
            step = grad.float() * 0.5 if momentum is None else momentum[: self.n].mul_(0.9).add_(grad, alpha=0.5)
            flat += step
            grad.zero_()
            if each:
                torch.topk(flat.abs() / (weight.float().abs() + floor), max(1, self.blocks * each // ranks))

        read_weight = each >= ranks  # then this rank leads in every block
        size = self.n * (8 + grad.element_size() * (1 + read_weight) + 8 * velocity)
        self.row(f"accumulate_select {name}", seconds, size, self.time(obvious, 3), wrong)

    def take_put(self, each: int, dtype: torch.dtype) -> None:
        """``each`` slots a block. The obvious code sends the same entries by flat int64 indices."""
        slots, padded = each * self.blocks, self.blocks * BLOCK
        generator = torch.Generator().manual_seed(1)
        offsets = torch.randint(0, BLOCK, (slots,), generator=generator).to(torch.uint8).to(self.device)
        segments = torch.tensor([[0, self.blocks, 0, slots]], device=self.device)
        residual, grad = self.random(padded), torch.zeros(self.n, device=self.device)
        invalid = torch.zeros(1, dtype=torch.int32, device=self.device)
        payload = torch.empty(slots, dtype=dtype, device=self.device)
        indices = reference._positions(offsets, segments, 0).clamp(max=self.n - 1)

        mine, wanted, sent = residual.clone(), residual.clone(), payload.clone()
        ops.take(mine, None, offsets, segments, invalid, payload, 0, 65504.0)
        reference.take(wanted, None, offsets, segments, invalid, sent, 0, 65504.0)
        wrong = int((mine != wanted).sum()) + int((payload != sent).sum())

        def again() -> None:
            mine.copy_(residual)

        seconds = self.time(lambda: ops.take(mine, None, offsets, segments, invalid, payload, 0, 65504.0), before=again)

        def obvious_take() -> None:
            value = mine[indices]
            payload.copy_(value)
            mine[indices] = value - payload.float()

        size = slots * (1 + 8 + payload.element_size())
        self.row(f"take {each} of 256, {dtype}", seconds, size, self.time(obvious_take, before=again), wrong)

        other = grad.clone()
        mine.copy_(wanted)
        ops.put([grad], mine, offsets, segments, payload, payload, 0, 0.25)
        reference.put([other], wanted, offsets, segments, payload, payload, 0, 0.25)
        wrong = int((grad != other).sum()) + int((mine != wanted).sum())
        seconds = self.time(lambda: ops.put([grad], mine, offsets, segments, payload, payload, 0, 0.25), before=again)

        def obvious_put() -> None:
            grad[indices] = payload.float() * 0.25

        size = slots * (1 + 4 + payload.element_size())
        self.row(f"put {each} of 256, {dtype}", seconds, size, self.time(obvious_put, before=again), wrong)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--numel", type=int, default=25_000_000)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=11)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    bench = Bench(args.device, args.numel, args.repeats)
    compiled = ops.COMPILED_CUDA if args.device == "cuda" else ops.COMPILED
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {args.threads} threads"
    print(f"{args.numel:,} entries, {where}, torch {torch.__version__}, compiled: {compiled}", end=", ")
    print(f"copy {bench.copy:.1f} GB/s\n")
    print("| operator | ms | GB/s | of copy | torch / ours | wrong |\n|---|---|---|---|---|---|")
    every = 2**32
    bench.accumulate_select("fp32, 1 of 4 slots", torch.float32, 4, 4, 0, False)
    bench.accumulate_select("fp32, 1 of 4 slots, velocity", torch.float32, 4, 4, 0, True)
    bench.accumulate_select("fp32, 1 of 4 slots, explored", torch.float32, 4, 4, every, False)
    bench.accumulate_select("fp32, 4 slots", torch.float32, 4, 1, 0, False)
    bench.accumulate_select("fp32, 16 slots", torch.float32, 16, 1, 0, False)
    bench.accumulate_select("fp32, no slots", torch.float32, 0, 1, 0, False)
    bench.accumulate_select("bf16, 1 of 4 slots", torch.bfloat16, 4, 4, 0, False)
    bench.accumulate_select("fp16, 1 of 4 slots", torch.float16, 4, 4, 0, False)
    bench.take_put(4, torch.float32)
    bench.take_put(4, torch.float16)


if __name__ == "__main__":
    main()
