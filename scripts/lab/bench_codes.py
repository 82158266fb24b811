#!/usr/bin/env python3
"""Time the operators on codes against memory bandwidth and fp16, all in the same run.

    python scripts/lab/bench_codes.py --device cpu --numel 25000000 --threads 1

GB/s counts the bytes that have to cross memory; "of copy" is its share of what ``b.copy_(a)`` reaches on tensors of
this size. "fp16 / ours" is how many times longer a cast to fp16 (for a decoder: from fp16) takes, by ``copy_`` into
existing memory. "wrong" counts results that differ from hvd_compress/reference, for FEW values, since the reference is
slow: if any does, the exit status is 1. "runs": the operators of hvd_compress.Quantized.

``ATEN_CPU_CAPABILITY=avx2`` in the environment limits torch and the operators to AVX2, on every processor.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from bench_ops import Bench, started, table

from hvd_compress import ops
from hvd_compress.codecs.codebooks import codebook_on

FEW = 80_640
GROUPS = 4
RUN = 512  # values that share a scale

Row = tuple[str, str, dict[str, Any], float]  # name, operator, its arguments, bytes that cross memory for a value


class Codes(Bench):
    def __init__(self, device: str, numel: int, repeats: int) -> None:
        super().__init__(device, numel, repeats)
        self.values, self.error = self.random(numel), self.zeros(numel)
        self.scale, self.edges = self.scales(GROUPS), self.even(GROUPS)
        self.half = self.values.half()
        self.casts = {
            "encode": lambda: self.half.copy_(self.values),
            "decode": lambda: self.error.copy_(self.half),
        }

    def even(self, groups: int) -> torch.Tensor:
        """The edges of groups of equally many values."""
        return torch.arange(groups + 1, device=self.device) * self.n // groups

    def scales(self, groups: int) -> torch.Tensor:
        return torch.linspace(0.5, 2.0, groups, device=self.device)

    def all(self) -> Iterator[Row]:
        # One group is what a GPU's blocks cannot share out.
        for groups in (GROUPS, 1):
            yield from self.sums(groups)
        yield from self.lanes(4, 6, -1)
        yield from self.lanes(4, 6, 1234)
        yield from self.codebook(4, GROUPS)
        yield from self.ring()
        positive, mantissa = (2**10 - 1) // 2, 5
        highest = int(self.values.abs().max().view(torch.int32)) >> (23 - mantissa)
        base = torch.full((GROUPS,), max(1, highest - positive + 1), device=self.device)
        options = {"edges": self.edges, "base": base, "mantissa": mantissa, "positive": positive}
        yield from self.codec("range", 10, options)

    def sums(self, groups: int) -> Iterator[Row]:
        """Each group's moments, and the scales of lanes, which begin with them."""
        edges, name = self.even(groups), f"groups: {groups}"
        out = self.zeros(groups, 3, dtype=torch.float64)
        yield name, "moments", {"values": self.values, "edges": edges, "out": out}, 4
        shared, kind = self.scale[:groups].double(), torch.arange(groups, device=self.device) % 2
        header = self.zeros(1 + (groups + 1) // 2, dtype=torch.int64)
        scales = {"edges": edges, "shared_scale": shared, "kind": kind, "header": header, "ranks": 4}
        written = {"invalid": self.zeros(1, dtype=torch.int32), "step": self.zeros(groups)}
        yield name, "lanes_prepare", {"values": self.values, **scales, "grid": self.scale[:2].double(), **written}, 4
        after = {"next_scale": torch.zeros_like(shared), "next_kind": torch.zeros_like(kind)}
        yield name, "lanes_update", {"mean": self.values, **scales, **after}, 4

    def lanes(self, bits: int, width: int, key: int) -> Iterator[Row]:
        count = 64 // width
        words = self.zeros(-(-self.n // count), dtype=torch.int64)
        common = {"words": words, "scale": self.scale, "edges": self.edges, "width": width}
        encoded = {**common, "values": self.values, "quantization_error": self.error, "bits": bits, "key": key}
        yield f"{bits} bits in {width}{', stochastic' if key >= 0 else ''}", "lanes_encode", encoded, 8 + 8 / count
        if key >= 0:
            yield f"{width}", "lanes_decode", {**common, "values": self.zeros(self.n), "factor": 0.25}, 4 + 8 / count

    def codebook(self, bits: int, groups: int) -> Iterator[Row]:
        book = codebook_on(bits, self.device)
        kind = torch.arange(groups, device=self.device) % 2
        options = {"edges": self.even(groups), "scale": self.scales(groups), "book": book, "kind": kind}
        yield from self.codec("codebook", bits, options)

    def ring(self) -> Iterator[Row]:
        """A coded ring with a scale for every run. The values of all ranks are added by the decoder."""
        runs = -(-self.n // RUN)
        out = self.zeros(runs, 3, dtype=torch.float64)
        yield "runs", "moments", {"values": self.values, "edges": self.even(runs), "out": out}, 4
        for bits in (1, 2, 4, 8):
            for name, operator, arguments, each in self.codebook(bits, runs):
                yield f"{name}, runs", operator, arguments, each
            yield f"{bits} bits, runs, added", operator, {**arguments, "add": True}, each + 4

    def codec(self, name: str, bits: int, options: dict[str, Any]) -> Iterator[Row]:
        common = {**options, "bits": bits, "codes": self.zeros(-(-self.n // 8) * bits, dtype=torch.uint8)}
        encoded = {**common, "values": self.values, "quantization_error": self.error}
        yield f"{bits} bits", f"{name}_encode", encoded, 8 + bits / 8
        yield f"{bits} bits", f"{name}_decode", {**common, "values": self.zeros(self.n), "add": False}, 4 + bits / 8


def main() -> int:
    bench = started(Codes, __doc__)
    new, existing = bench.time(lambda: bench.values.half()), bench.time(bench.casts["encode"])
    print(f"half() takes {new * 1e3:.3f} ms, into existing memory {existing * 1e3:.3f} ms.\n")
    few = Codes(bench.device, FEW, 1)
    for (name, operator, arguments, each), (_, _, checked, _) in zip(bench.all(), few.all(), strict=True):
        wrong = few.differing(operator, checked)
        for given in (arguments, checked):  # a decoder reads what the encoder before it wrote
            getattr(ops, operator)(**given)
        cast = bench.casts["decode" if "decode" in operator else "encode"]
        bench.row(name, operator, arguments, each * bench.n, cast, column="fp16 / ours", wrong=wrong)
    print(table.markdown(bench.rows))
    return 1 if bench.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
