"""What every method sends in a step, by formula: any number of ranks, without running it.

``scripts/lab/scaling.py`` and ``tests/lab/test_scaling.py`` compare the formulas with counted bytes.
"""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from .. import (
    DGC,
    FFT,
    IWP,
    MIPD,
    MP2,
    QSGD,
    Compressor,
    DeMo,
    NoCompression,
    PowerSGD,
    Quantized,
    SlimDP,
    TernGrad,
    TopK,
)
from ..codecs.coded_ring import CodedRing
from ..codecs.packed import Lloyd
from ..engine.collectives import Verb, ring_bytes
from ..selection.budget import apportion

Sum = Literal["fp32", "fp16", "int64", "bytes"]


@dataclass(frozen=True)
class Message:
    """A collective to which each rank contributes ``size`` bytes of a type."""

    verb: Verb
    size: float
    type: Sum = "bytes"

    def sent(self, ranks: int) -> float:
        """Bytes that a rank sends."""
        return ring_bytes(self.verb, self.size, ranks)  # type: ignore[arg-type]


Messages = list[Message]


def sent(messages: Iterable[Message], ranks: int) -> float:
    """Bytes that a rank sends."""
    return sum(message.sent(ranks) for message in messages)


def is_compressed(shape: Sequence[int]) -> bool:
    """Whether a parameter of this shape is compressed by default."""
    return len(shape) >= 2 and math.prod(shape) >= 1024


class Wire:
    """What one of ``n`` ranks sends in a step of a model with these ``shapes`` that fits into one bucket, term by term.
    ``density``: the share of entries sent, or None."""

    def __init__(self, shapes: Sequence[Sequence[int]], density: float | None, n: int) -> None:
        self.large = [shape for shape in shapes if is_compressed(shape)]
        sizes = [math.prod(shape) for shape in self.large]
        self.n, self.tensors, self.entries = n, len(sizes), sum(sizes)
        self.all = sum(math.prod(shape) for shape in shapes)
        self.pieces = [-(-size // 256) * 256 for size in sizes]  # whole blocks of 256
        self.padded = sum(self.pieces)
        self.runs = sum(-(-size // 512) for size in sizes)  # of QSGD, which have a norm each
        self.k = max(1, round((density or 1.0) * self.entries))
        sizes = sizes[::-1]  # a bucket begins with the last piece
        self.groups = apportion(max(self.k, len(sizes)), sizes, sizes)

    def ring(self, size: float, type: Sum) -> Messages:
        return [Message("allreduce", size, type)]

    def gather(self, size: float) -> Messages:
        return [Message("allgather", size)]

    def dense(self, width: int) -> Messages:
        return self.ring(width * self.all, "fp16" if width == 2 else "fp32")

    def rest(self) -> Messages:  # norms, biases, small tensors: uncompressed
        return self.ring(4 * (self.all - self.entries), "fp32")

    def lanes(self, count: int, bits: int) -> int:  # integers in words of 64 bits, with room for the sum of n
        return 8 * math.ceil(count / (64 // (bits + math.ceil(math.log2(self.n)))))

    def with_means(self) -> "Wire":  # one more value per block, in one more group per tensor; indices are unchanged
        more = copy.copy(self)
        more.k, more.tensors = self.k + self.padded // 256, 2 * self.tensors
        more.groups = [*self.groups, *(size // 256 for size in self.pieces[::-1])]
        return more

    def lanes4(self) -> Messages:  # values; a word for invalid ranks; the scales of two groups per word
        return self.ring(self.lanes(self.k, 4) + 8 + 8 * math.ceil(self.tensors / 2), "int64")

    def lloyd4(
        self,
    ) -> Messages:  # 4 bits a value to its owner and back, and a scale a run
        size = CodedRing(Lloyd(4)).message_size(self.groups, self.n)
        return [Message("alltoall", self.n * size), *self.gather(size)]

    def leaders(self, flags: int = 0) -> Messages:  # each rank's share of the indices, one byte each, after a header
        return self.gather(4 + flags + math.ceil(self.k / self.n))

    def agreed(self) -> Messages:  # no indices, but a hash to compare: three float64
        return self.ring(24, "fp32")

    def frequencies(self, flags: int = 0) -> Messages:  # header, a byte an index or a bitmap; scales, 10 bits a value
        return self.gather(4 + flags + min(self.k, self.padded // 8) + 4 * self.tensors + 10 * math.ceil(self.k / 8))

    def per_rank(self) -> Messages:  # header, four bytes an index; scales, four bytes a value
        return self.gather(4 + 4 * self.k + 4 * self.tensors + 4 * self.k)

    def scaled(self, bits: int) -> Messages:  # to each entry's owner and back: codes, and a scale a run
        size = CodedRing(Lloyd(bits)).message_size(self.pieces[::-1], self.n)  # a bucket begins with the last piece
        return [Message("alltoall", self.n * size), *self.gather(size)]

    def levels(self) -> Messages:  # 4 bits an entry, and a norm a run
        return self.gather(8 * math.ceil(self.padded / 16) + 4 * self.runs)

    def ternary(self) -> Messages:  # every rank's scale of each tensor to all; 2 bits an entry
        return [*self.gather(4 * self.tensors), *self.ring(self.lanes(self.padded, 2), "int64")]

    def factors(self, rank: int) -> Messages:  # P and matrices that would not get smaller, after a flag; Q
        first, second = 1, 0
        for shape in self.large:
            n, m = shape[0], math.prod(shape[1:])
            r = min(rank, n, m)
            small = r * (n + m) < n * m
            first, second = first + (r * n if small else n * m), second + (r * m if small else 0)
        return [*self.ring(2 * first, "fp16"), *self.ring(2 * second, "fp16")]


@dataclass(frozen=True)
class Method:
    """How a method is built, with its defaults; its default density, if it has one; what it sends; and whether it
    trains well with AdamW, or in its place (docs/choosing.md)."""

    build: Callable[..., Compressor]
    density: float | None
    messages: Callable[[Wire], Messages]
    adam: bool = False


_lloyd4 = partial(IWP, values="lloyd4")
_gathered = partial(FFT, exchange="gather")
_demo = partial(DeMo, exchange="gather")
_two_bits = partial(Quantized, bits=2)
METHODS: dict[str, Method] = {
    "dense": Method(NoCompression, None, lambda w: w.dense(4), adam=True),
    "fp16": Method(partial(NoCompression, values="fp16"), None, lambda w: w.dense(2), adam=True),
    "IWP": Method(IWP, 1 / 32, lambda w: w.leaders() + w.with_means().lanes4() + w.rest()),
    "IWP, lloyd4": Method(_lloyd4, 1 / 32, lambda w: w.leaders() + w.with_means().lloyd4() + w.rest()),
    "FFT": Method(FFT, 1 / 32, lambda w: w.leaders() + w.lanes4() + w.rest()),
    "DeMo": Method(DeMo, 1 / 16, lambda w: w.leaders(w.tensors) + w.lloyd4() + w.rest(), adam=True),
    "MIPD": Method(MIPD, 1 / 64, lambda w: w.agreed() + w.lanes4() + w.rest()),
    "SlimDP": Method(SlimDP, 1 / 32, lambda w: w.agreed() + w.lanes4() + w.rest()),
    "MP2": Method(MP2, 1 / 9, lambda w: w.agreed() + w.lanes4() + w.rest()),
    "FFT, gather": Method(_gathered, 1 / 32, lambda w: w.frequencies() + w.rest()),
    "DeMo, gather": Method(_demo, 1 / 64, lambda w: w.frequencies(w.tensors) + w.rest(), adam=True),
    "TopK": Method(TopK, 1 / 256, lambda w: w.per_rank() + w.rest()),
    "DGC": Method(DGC, 1 / 1000, lambda w: w.per_rank() + w.rest()),
    "PowerSGD": Method(PowerSGD, None, lambda w: w.factors(4) + w.rest()),
    "Quantized": Method(Quantized, None, lambda w: w.agreed() + w.scaled(4) + w.rest(), adam=True),
    "Quantized, 2 bits": Method(_two_bits, None, lambda w: w.agreed() + w.scaled(2) + w.rest(), adam=True),
    "QSGD": Method(QSGD, None, lambda w: w.agreed() + w.levels() + w.rest(), adam=True),
    "TernGrad": Method(TernGrad, None, lambda w: w.agreed() + w.ternary() + w.rest(), adam=True),
}
BASELINES = ("dense", "fp16")


def messages(method: str, shapes: Sequence[Sequence[int]], density: float | None, ranks: int) -> Messages:
    """The collectives of a step."""
    return METHODS[method].messages(Wire(shapes, density, ranks))
