#!/usr/bin/env python3
"""Bytes that a rank sends in a step, from 2 to 1024 ranks: counted up to 16, and by formulas that the counts verify.

    python scripts/scaling.py --json docs/results/scaling.json

Ranks are threads of this process. Counted is ``stats()["last"]["wire_bytes"]`` of rank 0's third step: every tensor
that it hands to a collective, times what the collective's algorithm sends of it. More ranks are computed by METHODS,
below. Exit status 1 where a formula and a count differ by 1 % or more."""

import copy
import math
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path

import table
import torch
from experiment import metrics
from experiment.files import script_parser, write_json

from hvd_compress import DGC, FFT, IWP, MIPD, MP2, QSGD, Compressor, DeMo, SlimDP, TernGrad, TopK
from hvd_compress.hosts.threads import ThreadWorld

COUNTED, MODELLED, PRINTED = (2, 4, 8, 16), (64, 256, 1024), (2, 4, 16, 64, 1024)
ALLOWED = 0.01


class Wire:
    """What one of ``n`` ranks sends in a step, term by term, of a model whose tensors fit into one bucket."""

    def __init__(self, model: torch.nn.Module, density: float | None, n: int) -> None:
        sizes = [p.numel() for p in model.parameters() if p.dim() >= 2 and p.numel() >= 1024]
        self.n, self.tensors, self.entries = n, len(sizes), sum(sizes)
        self.all = sum(p.numel() for p in model.parameters())
        self.padded = sum(-(-size // 256) * 256 for size in sizes)  # whole blocks of 256
        self.runs = sum(-(-size // 512) for size in sizes)  # of QSGD, which have a norm each
        self.k = max(1, round((density or 1.0) * self.entries))

    def ring(self, size: float) -> float:  # an allreduce: reduce-scatter and allgather
        return 2 * (self.n - 1) / self.n * size

    def gather(self, size: float) -> float:  # an allgather
        return (self.n - 1) * size

    def rest(self) -> float:  # norms, biases, small tensors: uncompressed
        return self.ring(4 * (self.all - self.entries))

    def lanes(self, count: int, bits: int) -> int:  # integers in words of 64 bits, with room for the sum of n
        return 8 * math.ceil(count / (64 // (bits + math.ceil(math.log2(self.n)))))

    def with_means(self) -> "Wire":  # one more value per block, in one more group per tensor; indices are unchanged
        more = copy.copy(self)
        more.k, more.tensors = self.k + self.padded // 256, 2 * self.tensors
        return more

    def lanes4(self) -> float:  # values; a word for invalid ranks; the scales of two groups per word
        return self.ring(self.lanes(self.k, 4) + 8 + 8 * math.ceil(self.tensors / 2))

    def lloyd4(self) -> float:  # 4 bits a value to its owner, in whole bytes; back, with two scales a group each time
        part = 4 * math.ceil(self.k / (8 * self.n))
        return (self.n - 1) * part + self.gather(8 * self.tensors + part)

    def leaders(self) -> float:  # each rank's share of the indices, one byte each, after a header of four
        return self.gather(4 + math.ceil(self.k / self.n))

    def agreed(self) -> float:  # no indices, but a hash to compare: three float64
        return self.ring(24)

    def frequencies(self) -> float:  # per rank: header, a byte an index or a bitmap; scales, 10 bits a value
        return self.gather(4 + min(self.k, self.padded // 8) + 4 * self.tensors + 10 * math.ceil(self.k / 8))

    def per_rank(self) -> float:  # header, four bytes an index; scales, four bytes a value
        return self.gather(4 + 4 * self.k + 4 * self.tensors + 4 * self.k)

    def levels(self) -> float:  # 4 bits an entry, and a norm a run
        return self.gather(8 * math.ceil(self.padded / 16) + 4 * self.runs)

    def ternary(self) -> float:  # every rank's scale of each tensor to all; 2 bits an entry
        return self.gather(4 * self.tensors) + self.ring(self.lanes(self.padded, 2))


_dense = partial(IWP, min_numel=10**9)
_lloyd4 = partial(IWP, values="lloyd4")
_gathered = partial(FFT, exchange="gather")
#: How it is built; its default density, if it has one; what it sends.
METHODS: dict[str, tuple[Callable[..., Compressor], float | None, Callable[[Wire], float]]] = {
    "dense": (_dense, None, lambda w: w.ring(4 * w.all)),
    "fp16": (partial(_dense, dense_values="fp16"), None, lambda w: w.ring(2 * w.all)),
    "IWP": (IWP, 1 / 32, lambda w: w.leaders() + w.with_means().lanes4() + w.rest()),
    "IWP, lloyd4": (_lloyd4, 1 / 32, lambda w: w.leaders() + w.with_means().lloyd4() + w.rest()),
    "FFT": (FFT, 1 / 32, lambda w: w.leaders() + w.lanes4() + w.rest()),
    "DeMo": (DeMo, 1 / 16, lambda w: w.leaders() + w.lloyd4() + w.rest()),
    "MIPD": (MIPD, 1 / 64, lambda w: w.agreed() + w.lanes4() + w.rest()),
    "SlimDP": (SlimDP, 1 / 32, lambda w: w.agreed() + w.lanes4() + w.rest()),
    "MP2": (MP2, 1 / 9, lambda w: w.agreed() + w.lanes4() + w.rest()),
    "FFT, gather": (_gathered, 1 / 32, lambda w: w.frequencies() + w.rest()),
    "DeMo, gather": (partial(DeMo, exchange="gather"), 1 / 64, lambda w: w.frequencies() + w.rest()),
    "TopK": (TopK, 1 / 256, lambda w: w.per_rank() + w.rest()),
    "DGC": (DGC, 1 / 1000, lambda w: w.per_rank() + w.rest()),
    "QSGD": (QSGD, None, lambda w: w.agreed() + w.levels() + w.rest()),
    "TernGrad": (TernGrad, None, lambda w: w.agreed() + w.ternary() + w.rest()),
}


def modelled(method: str, model: torch.nn.Module, density: float | None, ranks: int) -> float:
    return METHODS[method][2](Wire(model, density, ranks))


def counted(method: str, model: torch.nn.Module, density: float | None, ranks: int) -> float:
    world = ThreadWorld(ranks, timeout=300)
    options = {} if density is None else {"density": density}

    def train(rank: int) -> float:
        mine, generator = copy.deepcopy(model), torch.Generator().manual_seed(rank)
        compression = METHODS[method][0](mine.named_parameters(), collectives=world.collectives(rank), **options)
        for _ in range(3):
            for p in mine.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
            # Uncompressed tensors are counted when they are handed over; their average is not needed here.
            for payload, context in [compression.compress(p.grad) for p in mine.parameters()]:
                compression.decompress(payload, context)
        return float(compression.stats()["last"]["wire_bytes"])

    return world.run(train)[0]


def network() -> torch.nn.Module:
    conv, linear = torch.nn.Conv2d, torch.nn.Linear
    return torch.nn.ModuleList(
        [conv(64, 128, 3), conv(128, 256, 3), conv(256, 128, 3), linear(1152, 256), linear(256, 100)]
        + [torch.nn.BatchNorm2d(width) for width in (128, 256, 128)]
    )


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--density", type=lambda text: float(Fraction(text)), help="for all; else each one's default")
    parser.add_argument("--json", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, found, worst, rows = network(), {}, dict.fromkeys(COUNTED, 0.0), []
    for method, (_, density, _) in METHODS.items():
        density = density and (args.density or density)
        bytes_of = {n: counted(method, model, density, n) for n in COUNTED}
        for n, sent in bytes_of.items():
            worst[n] = max(worst[n], abs(modelled(method, model, density, n) / sent - 1))
        bytes_of |= {n: modelled(method, model, density, n) for n in MODELLED}
        ratios = [modelled("dense", model, None, n) / sent for n, sent in bytes_of.items()]
        found[method] = {"density": density or 1.0, "bytes": bytes_of, "dense_over_bytes": ratios}
        texts = {n: f"{sent:,.0f} ({ratio:.3g})" for (n, sent), ratio in zip(bytes_of.items(), ratios, strict=True)}
        cells = {f"N = {n}": texts[n] for n in PRINTED}
        rows.append({"method": method, "density": f"1/{1 / density:g}" if density else "1", **cells})
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters; bytes a rank sends (dense ring / this);", end=" "
    )
    print(f"N = {' and '.join(map(str, MODELLED))} by formula\n\n{table.markdown(rows)}")
    print("\nLargest relative difference of formula and count: " + ", ".join(f"N = {n} {worst[n]:.4%}" for n in worst))
    write_json(args.json, {"config": metrics.environment(), "counted": COUNTED, "difference": worst, "methods": found})
    sys.exit(max(worst.values()) >= ALLOWED)


if __name__ == "__main__":
    main()
