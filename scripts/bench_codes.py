#!/usr/bin/env python3
"""Times the operators on codes against memory bandwidth, fp16 and the obvious torch code, all in the same run.

    python scripts/bench_codes.py --device cpu --numel 25000000 --threads 1

GB/s counts the bytes that have to cross memory; "of copy" is its share of what ``b.copy_(a)`` reaches on tensors of
this size. "fp16 / ours" is how many times longer a cast to fp16 takes (for a decoder: one from fp16), as
``values.half()``, whose result is new memory, and then as a ``copy_`` into memory that is there, as ours is; it has
nothing to say of what was lost. "torch / ours" is the same for plain torch code; "wrong" counts results that differ
from hvd_compress/reference/codes.py and scales.py, among the values around the groups' ends (for sums over groups,
among groups of fewer values): if any does, the exit status is 1.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from bench_ops import Bench, started
from torch import Tensor

from hvd_compress import ops, reference

CHECKED = 10_080  # values: whole words of any number of lanes, and whole bytes of codes
GROUPS = 4


def differ(got: Tensor, want: Tensor) -> int:
    return int((got != want).sum())


def even(n: int, groups: int, device: str) -> Tensor:
    """Where groups of equally many values begin and end."""
    return torch.arange(groups + 1, device=device) * n // groups


class Codes(Bench):
    def __init__(self, device: str, numel: int, repeats: int) -> None:
        super().__init__(device, numel, repeats)
        self.values, self.lost = self.random(numel), torch.zeros(numel, device=device)
        self.scale = torch.linspace(0.5, 2.0, GROUPS, device=device)
        self.edges = even(numel, GROUPS, device)
        self.each = torch.repeat_interleave(self.scale, self.edges.diff())
        self.few = self.values[: 8 * CHECKED]
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
        self.wrong += wrong
        new, there = self.casts[like]
        rate = each * self.n / seconds / 1e9
        print(
            f"| {name} | {seconds * 1e3:.3f} | {rate:.1f} | {rate / self.copy:.0%} | {new / seconds:.2f} "
            f"| {there / seconds:.2f} | {other / seconds:.1f} | {wrong} |",
            flush=True,
        )

    def checked(self) -> Iterator[tuple[slice, Tensor]]:
        """What is compared with the reference, which takes long: values on both sides of every group's end, beginning
        with a word of any number of lanes; and their groups' edges."""
        for edge in self.edges[1:].tolist():
            begin = (edge - 1) // CHECKED * CHECKED
            end = min(self.n, begin + 2 * CHECKED)
            yield slice(begin, end), self.edges.clamp(begin, end) - begin

    def moments(self, groups: int) -> None:
        out, want = (torch.zeros(groups, 3, dtype=torch.float64, device=self.device) for _ in range(2))
        edges, few = even(self.n, groups, self.device), even(len(self.few), groups, self.device)
        ops.moments(self.few, few, out)
        reference.moments(self.few, few, want)

        def plain() -> None:
            square = self.values.double().square_()
            square.sum(), square.square_().sum(), self.values.abs().max()

        wrong = differ(out, want)
        self.show(f"moments, groups: {groups}", "encode", 4, wrong, lambda: ops.moments(self.values, edges, out), plain)

    def scales(self, groups: int) -> None:
        """What lanes' words carry beside the values: before they are written, and after their average was read."""
        edges, few = even(self.n, groups, self.device), even(len(self.few), groups, self.device)
        shared, kind = self.scale[:groups].double(), torch.arange(groups, device=self.device) % 2
        grid, flag = self.scale[:2].double(), torch.zeros(1, dtype=torch.int32, device=self.device)
        step = torch.zeros(groups, device=self.device)
        rest = torch.zeros(1 + (groups + 1) // 2, dtype=torch.int64, device=self.device)
        after = torch.zeros_like(shared), torch.zeros_like(kind)
        prepared, followed = (shared, kind, grid, flag, step, rest, 4), (shared, kind, rest, *after, 4)
        for operator, numbers in (("lanes_prepare", prepared), ("lanes_follow", followed)):
            ours, plain = getattr(ops, operator), getattr(reference, operator)
            mine, wanted = ([x.clone() if isinstance(x, Tensor) else x for x in numbers] for _ in range(2))
            ours(self.few, few, *mine)
            plain(self.few, few, *wanted)
            wrong = sum(differ(a, b) for a, b in zip(mine, wanted, strict=True) if isinstance(a, Tensor))
            if operator == "lanes_prepare":
                rest.copy_(mine[5])  # what lanes_follow is to read

            def run(ours: Callable[..., None] = ours, numbers: tuple[Any, ...] = numbers) -> None:
                ours(self.values, edges, *numbers)

            def obvious() -> None:
                square = self.values.double().square_()
                square.sum(), square.square_().sum()

            self.show(f"{operator}, groups: {groups}", "encode", 4, wrong, run, obvious)

    def lanes(self, bits: int, width: int, key: int) -> None:
        count, top = 64 // width, 2 ** (bits - 1) - 1
        words = torch.zeros(-(-self.n // count), dtype=torch.int64, device=self.device)
        shift = width * torch.arange(count, device=self.device)

        def encode() -> None:
            ops.lanes_encode(self.values, self.scale, self.edges, words, self.lost, bits, width, key)

        def plain_encode() -> None:
            draw = torch.rand_like(self.values) if key >= 0 else 0.5
            q = (self.values / self.each).add_(draw).floor_().clamp_(-top, top)
            self.lost.copy_(self.values - q * self.each)
            words.copy_((torch.nn.functional.pad(q.long(), (0, -self.n % count)).view(-1, count) << shift).sum(1))

        encode()
        wrong = 0
        for part, edges in self.checked():
            got = words[part.start // count : -(-part.stop // count)]
            want, lost = torch.empty_like(got), torch.empty_like(self.lost[part])
            # The draw of value i is a hash of i * 0x9E3779B1 + key.
            from_there = key if key == -1 else (key + part.start * 0x9E3779B1) % 2**32
            reference.lanes_encode(self.values[part], self.scale, edges, want, lost, bits, width, from_there)
            wrong += differ(got, want) + differ(self.lost[part], lost)
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
        wrong = 0
        for part, edges in self.checked():
            want = torch.empty_like(values[part])
            codes = words[part.start // count : -(-part.stop // count)]
            reference.lanes_decode(codes, self.scale, edges, want, width, 0.25)
            wrong += differ(values[part], want)
        self.show(f"lanes_decode {width}", "decode", 4 + 8 / count, wrong, decode, plain_decode)

    def codes(
        self, name: str, bits: int, encode: Callable, decode: Callable, plain_encode: Callable, plain_decode: Callable
    ) -> None:
        """``encode(module, values, edges, codes, lost)`` and ``decode(module, codes, edges, values)``."""
        codes = torch.zeros(-(-self.n // 8) * bits, dtype=torch.uint8, device=self.device)
        values = torch.zeros_like(self.values)
        encode(ops, self.values, self.edges, codes, self.lost)
        decode(ops, codes, self.edges, values)
        wrong, wrong_decoded = 0, 0
        for part, edges in self.checked():
            got = codes[part.start // 8 * bits : -(-part.stop // 8) * bits]
            want, lost = torch.empty_like(got), torch.empty_like(self.lost[part])
            encode(reference, self.values[part], edges, want, lost)
            wrong += differ(got, want) + differ(self.lost[part], lost)
            decode(reference, got, edges, lost)
            wrong_decoded += differ(values[part], lost)
        self.show(
            f"{name}_encode {bits} bits",
            "encode",
            8 + bits / 8,
            wrong,
            lambda: encode(ops, self.values, self.edges, codes, self.lost),
            lambda: plain_encode(codes),
        )
        self.show(
            f"{name}_decode {bits} bits",
            "decode",
            4 + bits / 8,
            wrong_decoded,
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


def main() -> int:
    bench = started(Codes, __doc__)
    new, there = bench.casts["encode"]
    print(f"half() takes {new * 1e3:.3f} ms, into memory that is there {there * 1e3:.3f} ms.\n")
    print("| operator | ms | GB/s | of copy | fp16 / ours | fp16, no malloc / ours | torch / ours | wrong |")
    print("|---|---|---|---|---|---|---|---|")
    # One group is what a GPU's blocks cannot share out.
    for groups in (GROUPS, 1):
        bench.moments(groups)
        bench.scales(groups)
    bench.lanes(4, 6, -1)
    bench.lanes(4, 6, 1234)
    bench.lanes(6, 9, 1234)
    for bits in (1, 2, 4, 8):
        bench.codebook(bits)
    for bits, mantissa in ((8, 4), (10, 5), (12, 7)):
        bench.range(bits, mantissa)
    return 1 if bench.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
