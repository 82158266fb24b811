#!/usr/bin/env python3
"""Times the operators on codes against memory bandwidth, fp16 and the obvious torch code, all in the same run.

    python scripts/bench_codes.py --device cpu --numel 25000000 --threads 1

GB/s counts the bytes that have to cross memory; "of copy" is its share of what ``b.copy_(a)`` reaches on tensors of
this size. "fp16 / ours" is how many times longer a cast to fp16 takes (for a decoder: one from fp16), as
``values.half()``, whose result is new memory, and then as a ``copy_`` into memory that is there, as ours is; it has
nothing to say of what was lost. "torch / ours" is the same for plain torch code; "wrong" counts results that differ
from hvd_compress/reference/codes.py and scales.py, among the first values.
"""

from collections.abc import Callable
from typing import Any

import torch
from bench_ops import Bench, started
from torch import Tensor

from hvd_compress import ops, reference

CHECKED = 80_640  # values: whole words of any number of lanes
GROUPS = 4


def differ(got: Tensor, want: Tensor) -> int:
    return int((got[: len(want)] != want).sum())


class Codes(Bench):
    def __init__(self, device: str, numel: int, repeats: int) -> None:
        super().__init__(device, numel, repeats)
        self.values, self.lost = self.random(numel), torch.zeros(numel, device=device)
        self.scale = torch.linspace(0.5, 2.0, GROUPS, device=device)
        self.edges = torch.linspace(0, numel, GROUPS + 1, device=device).long()
        self.each = torch.repeat_interleave(self.scale, self.edges.diff())
        self.first = min(numel, CHECKED)
        self.first_edges = self.edges.clamp(max=self.first)
        half = self.values.half()
        self.casts = {
            "encode": (self.time(lambda: self.values.half()), self.time(lambda: half.copy_(self.values))),
            "decode": (self.time(lambda: half.float()), self.time(lambda: self.lost.copy_(half))),
        }

    def show(
        self, name: str, like: str, each: float, wrong: int, ours: Callable[[], object], theirs: Callable[[], object]
    ) -> None:
        """``each``: bytes that cross memory for a value."""
        seconds, other = self.time(ours), self.time(theirs, 3)
        new, there = self.casts[like]
        rate = each * self.n / seconds / 1e9
        print(
            f"| {name} | {seconds * 1e3:.3f} | {rate:.1f} | {rate / self.copy:.0%} | {new / seconds:.2f} "
            f"| {there / seconds:.2f} | {other / seconds:.1f} | {wrong} |",
            flush=True,
        )

    def moments(self) -> None:
        out, want = (torch.zeros(GROUPS, 3, dtype=torch.float64, device=self.device) for _ in range(2))
        first = self.values[: self.first]
        ops.moments(first, self.first_edges, out)
        reference.moments(first, self.first_edges, want)

        def plain() -> None:
            square = self.values.double().square_()
            square.sum(), square.square_().sum(), self.values.abs().max()

        wrong = differ(out, want)
        self.show("moments", "encode", 4, wrong, lambda: ops.moments(self.values, self.edges, out), plain)

    def scales(self) -> None:
        """What lanes' words carry beside the values: before they are written, and after their average was read."""
        shared, kind = self.scale.double(), torch.arange(GROUPS, device=self.device) % 2
        grid, flag = self.scale[:2].double(), torch.zeros(1, dtype=torch.int32, device=self.device)
        step, rest = torch.zeros_like(self.scale), torch.zeros(1 + GROUPS // 2, dtype=torch.int64, device=self.device)
        after = torch.zeros_like(shared), torch.zeros_like(kind)
        prepared, followed = (shared, kind, grid, flag, step, rest, 4), (shared, kind, rest, *after, 4)
        for operator, numbers in (("lanes_prepare", prepared), ("lanes_follow", followed)):
            ours, plain = getattr(ops, operator), getattr(reference, operator)
            mine, wanted = ([x.clone() if isinstance(x, Tensor) else x for x in numbers] for _ in range(2))
            first = self.values[: self.first]
            ours(first, self.first_edges, *mine)
            plain(first, self.first_edges, *wanted)
            wrong = sum(differ(a, b) for a, b in zip(mine, wanted, strict=True) if isinstance(a, Tensor))
            if operator == "lanes_prepare":
                rest.copy_(mine[5])  # what lanes_follow is to read

            def run(ours: Callable[..., None] = ours, numbers: tuple[Any, ...] = numbers) -> None:
                ours(self.values, self.edges, *numbers)

            def obvious() -> None:
                square = self.values.double().square_()
                square.sum(), square.square_().sum()

            self.show(operator, "encode", 4, wrong, run, obvious)

    def lanes(self, bits: int, width: int, key: int) -> None:
        count, top = 64 // width, 2 ** (bits - 1) - 1
        words = torch.zeros(-(-self.n // count), dtype=torch.int64, device=self.device)
        want, lost = words[: self.first // count].clone(), self.lost[: self.first].clone()
        shift = width * torch.arange(count, device=self.device)
        numbers = (bits, width, key)

        def encode() -> None:
            ops.lanes_encode(self.values, self.scale, self.edges, words, self.lost, *numbers)

        def plain_encode() -> None:
            draw = torch.rand_like(self.values) if key >= 0 else 0.5
            q = (self.values / self.each).add_(draw).floor_().clamp_(-top, top)
            self.lost.copy_(self.values - q * self.each)
            words.copy_((torch.nn.functional.pad(q.long(), (0, -self.n % count)).view(-1, count) << shift).sum(1))

        encode()
        reference.lanes_encode(self.values[: self.first], self.scale, self.first_edges, want, lost, *numbers)
        wrong = differ(words, want) + differ(self.lost, lost)
        name = f"lanes_encode {bits} bits in {width}{', stochastic' if key >= 0 else ''}"
        self.show(name, "encode", 8 + 8 / count, wrong, encode, plain_encode)
        if key == -1:
            return
        encode()
        values = torch.empty_like(self.values)

        def decode() -> None:
            ops.lanes_decode(words, self.scale, self.edges, values, width, 0.25)

        def plain_decode() -> None:
            half = 1 << (width - 1)
            digits = ((words + sum(half << (width * i) for i in range(count)))[:, None] >> shift) & (2 * half - 1)
            values.copy_((digits - half).view(-1)[: self.n].float().mul_(self.each).mul_(0.25))

        decode()
        reference.lanes_decode(words[: len(want)], self.scale, self.first_edges, lost, width, 0.25)
        wrong = differ(values, lost)
        self.show(f"lanes_decode {width}", "decode", 4 + 8 / count, wrong, decode, plain_decode)

    def codes(
        self, name: str, bits: int, encode: Callable, decode: Callable, plain_encode: Callable, plain_decode: Callable
    ) -> None:
        """``encode(module, values, edges, codes, lost)`` and ``decode(module, codes, edges, values)``."""
        codes = torch.zeros(-(-self.n // 8) * bits, dtype=torch.uint8, device=self.device)
        values = torch.zeros_like(self.values)
        want, lost = codes[: self.first // 8 * bits].clone(), self.lost[: self.first].clone()
        encode(ops, self.values, self.edges, codes, self.lost)
        encode(reference, self.values[: self.first], self.first_edges, want, lost)
        wrong = differ(codes, want) + differ(self.lost, lost)
        self.show(
            f"{name}_encode {bits} bits",
            "encode",
            8 + bits / 8,
            wrong,
            lambda: encode(ops, self.values, self.edges, codes, self.lost),
            lambda: plain_encode(codes),
        )
        decode(ops, codes, self.edges, values)
        decode(reference, want, self.first_edges, lost)
        self.show(
            f"{name}_decode {bits} bits",
            "decode",
            4 + bits / 8,
            differ(values, lost),
            lambda: decode(ops, codes, self.edges, values),
            lambda: plain_decode(codes, values),
        )

    def codebook(self, bits: int) -> None:
        book = torch.linspace(-2.5, 2.5, 2**bits, device=self.device).expand(2, -1).contiguous()
        kind = torch.arange(GROUPS, device=self.device) % 2
        middles = (book[0, 1:] + book[0, :-1]) / 2

        def plain_encode(codes: Tensor) -> None:
            code = torch.bucketize(self.values / self.each, middles)
            self.lost.copy_(self.values - book[0][code] * self.each)
            codes.copy_(reference.pack(code, bits))

        def plain_decode(codes: Tensor, values: Tensor) -> None:
            values.copy_(book[0][reference.unpack(codes, bits, self.n)] * self.each)

        self.codes(
            "codebook",
            bits,
            lambda where, values, edges, codes, lost: where.codebook_encode(
                values, self.scale, edges, book, kind, codes, lost, bits
            ),
            lambda where, codes, edges, values: where.codebook_decode(
                codes, self.scale, edges, book, kind, values, bits, False
            ),
            plain_encode,
            plain_decode,
        )

    def range(self, bits: int, mantissa: int) -> None:
        positive = (2**bits - 1) // 2
        highest = int(self.values.abs().max().view(torch.int32)) >> (23 - mantissa)
        base = torch.full((GROUPS,), max(1, highest - positive + 1), device=self.device)
        numbers = (bits, mantissa, positive)

        # Plain torch code for this format is the reference itself.
        def encode(where: object, values: Tensor, edges: Tensor, codes: Tensor, lost: Tensor) -> None:
            where.range_encode(values, base, edges, codes, lost, *numbers)  # type: ignore[attr-defined]

        def decode(where: object, codes: Tensor, edges: Tensor, values: Tensor) -> None:
            where.range_decode(codes, base, edges, values, *numbers, False)  # type: ignore[attr-defined]

        self.codes(
            "range",
            bits,
            encode,
            decode,
            lambda codes: encode(reference, self.values, self.edges, codes, self.lost),
            lambda codes, values: decode(reference, codes, self.edges, values),
        )


def main() -> None:
    bench = started(Codes, __doc__)
    new, there = bench.casts["encode"]
    print(f"half() takes {new * 1e3:.3f} ms, into memory that is there {there * 1e3:.3f} ms.\n")
    print("| operator | ms | GB/s | of copy | fp16 / ours | fp16, no malloc / ours | torch / ours | wrong |")
    print("|---|---|---|---|---|---|---|---|")
    bench.moments()
    bench.scales()
    bench.lanes(4, 6, -1)
    bench.lanes(4, 6, 1234)
    bench.lanes(6, 9, 1234)
    for bits in (1, 2, 4, 8):
        bench.codebook(bits)
    for bits, mantissa in ((8, 4), (10, 5), (12, 7)):
        bench.range(bits, mantissa)


if __name__ == "__main__":
    main()
