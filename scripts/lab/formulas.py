"""Formulas for the bytes that a rank sends in a step, for each method of ``hvd-compress estimate``, on any number of
ranks. ``scaling.py`` compares them with counted bytes, and tests/cli with the bytes of ``estimate``."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise

from hvd_compress.cli.methods import METHODS, is_compressed
from hvd_compress.engine.collectives import Verb, ring_bytes
from hvd_compress.selection.budget import apportion

#: Collectives, each with the bytes that a rank contributes.
Messages = list[tuple[Verb, int]]
#: Of the sizes of a codec's groups, and the ranks.
Codec = Callable[[Sequence[int], int], Messages]


def sent(messages: Messages, ranks: int) -> float:
    """Bytes that a rank sends."""
    return sum(ring_bytes(verb, size, ranks) for verb, size in messages)


# Codecs.


def packed(count: int, bits: int) -> int:
    """Codes, eight at a time; floats, one at a time."""
    return count * bits // 8 if bits in (16, 32) else -(-count // 8) * bits


def lanes4(sizes: Sequence[int], ranks: int) -> Messages:
    """Codes in lanes of 64 bits that have room for the sum, a flag, and scales."""
    lanes = 64 // (4 + (ranks - 1).bit_length())
    return [("allreduce", 8 * (-(-sum(sizes) // lanes) + 1 + -(-len(sizes) // 2)))]


def ring(bits: int, run: int = 512) -> Codec:
    """Codes of a part for each rank, and of an average; each part has two bytes a run. A run lies within a group."""

    def messages(sizes: Sequence[int], ranks: int) -> Messages:
        edges = list(accumulate(sizes, initial=0))
        part = max(8, -(-edges[-1] // (8 * ranks)) * 8)
        starts = {start for a, b in pairwise(edges) for start in range(a, b, run)}
        ends = {min(rank * part, edges[-1]) for rank in range(ranks)}
        counts = dict.fromkeys(range(ranks), 0)
        for start in starts | ends:
            if start < edges[-1]:
                counts[start // part] += 1
        size = 2 * max(counts.values()) + packed(part, bits)
        return [("alltoall", ranks * size), ("allgather", size)]

    return messages


def gather(bits: int) -> Codec:
    """A scale of each group, and codes."""
    return lambda sizes, ranks: [("allgather", 4 * len(sizes) + packed(sum(sizes), bits))]


def levels4(sizes: Sequence[int], ranks: int) -> Messages:
    """QSGD: a norm of each run of 512, and lanes of 4 bits."""
    runs = sum(-(-size // 512) for size in sizes)
    return [("allgather", 4 * runs + 8 * -(-sum(sizes) // 16))]


def ternary(sizes: Sequence[int], ranks: int) -> Messages:
    """TernGrad: a scale of each group, and lanes of 2 bits that have room for the sum."""
    lanes = 64 // (2 + (ranks - 1).bit_length())
    return [("allgather", 4 * len(sizes)), ("allreduce", 8 * -(-sum(sizes) // lanes))]


# Methods.


class Sizes:
    """A model that fits into one bucket: ``large``, the shapes of the compressed parameters; ``pieces``, their entries
    in whole blocks of 256, in the bucket's order; ``kept``, the entries that a method of this density sends."""

    def __init__(self, shapes: Iterable[Sequence[int]], density: float | None, ranks: int) -> None:
        shapes, self.ranks = list(shapes), ranks
        self.large = [shape for shape in shapes if is_compressed(shape)]
        self._entries = [math.prod(shape) for shape in self.large[::-1]]
        self.all = sum(map(math.prod, shapes))
        self.uncompressed = self.all - sum(self._entries)
        self.pieces = [-(-size // 256) * 256 for size in self._entries]
        self.kept = max(1, round((density or 1.0) * sum(self._entries)))

    def groups(self, means: bool = False) -> list[int]:
        """The numbers of values in the codec's groups: a parameter's kept entries; with ``means`` also its blocks'
        means."""
        kept = apportion(max(self.kept, len(self._entries)), self._entries, self._entries)
        return [*kept, *(size // 256 for size in self.pieces)] if means else kept


Sends = Callable[[Sizes], Messages]


def leaders(values: Codec, flag: int = 0, means: bool = False) -> Sends:
    """Each rank's share of the indices, one byte each, after a header and ``flag`` bytes for each parameter; values."""

    def sends(model: Sizes) -> Messages:
        indices = 4 + flag * len(model.pieces) + math.ceil(model.kept / model.ranks)
        return [("allgather", indices), *values(model.groups(means), model.ranks)]

    return sends


def agreed(values: Codec, every_entry: bool = False) -> Sends:
    """No indices, but a hash to compare: four bytes; values."""

    def sends(model: Sizes) -> Messages:
        groups = model.pieces if every_entry else model.groups()
        return [("allgather", 4), *values(groups, model.ranks)]

    return sends


def gathered(bits: int, flag: int, indices: Callable[[Sizes], int]) -> Sends:
    """Every rank's own entries: a header, ``flag`` bytes for each parameter and indices; values."""

    def sends(model: Sizes) -> Messages:
        head = 4 + flag * len(model.pieces)
        return [("allgather", head + indices(model)), *gather(bits)(model.groups(), model.ranks)]

    return sends


def byte_or_bitmap(model: Sizes) -> int:
    return min(model.kept, sum(model.pieces) // 8)


def four_bytes(model: Sizes) -> int:
    return 4 * model.kept


def factors(model: Sizes) -> Messages:
    """PowerSGD of rank 4, float16: P and matrices that would not get smaller, after a flag; Q."""
    first, second = 1, 0
    for shape in model.large:
        n, m = shape[0], math.prod(shape[1:])
        r = min(4, n, m)
        small = r * (n + m) < n * m
        first, second = first + (r * n if small else n * m), second + (r * m if small else 0)
    return [("allreduce", 2 * first), ("allreduce", 2 * second)]


#: The default density, if the method has one, and the messages for the compressed parameters; None: all are sent whole.
FORMULAS: dict[str, tuple[float | None, Sends | None]] = {
    "low_bit": (None, agreed(ring(2), every_entry=True)),
    "DeMo": (1 / 16, leaders(ring(4), flag=1)),
    "IWP": (1 / 32, leaders(lanes4, means=True)),
    "IWP, lloyd4": (1 / 32, leaders(ring(4), means=True)),
    "FFT": (1 / 32, leaders(lanes4)),
    "MIPD": (1 / 64, agreed(lanes4)),
    "SlimDP": (1 / 32, agreed(lanes4)),
    "MP2": (1 / 9, agreed(lanes4)),
    "FFT, gather": (1 / 32, gathered(10, 0, byte_or_bitmap)),
    "DeMo, gather": (1 / 64, gathered(10, 1, byte_or_bitmap)),
    "TopK": (1 / 256, gathered(32, 0, four_bytes)),
    "DGC": (1 / 1000, gathered(32, 4, four_bytes)),
    "PowerSGD": (None, factors),
    "Quantized": (None, agreed(ring(4), every_entry=True)),
    "QSGD": (None, agreed(levels4, every_entry=True)),
    "TernGrad": (None, agreed(ternary, every_entry=True)),
    "dense": (None, None),
    "fp16": (None, None),
}


def messages(method: str, shapes: Iterable[Sequence[int]], ranks: int, density: float | None = None) -> Messages:
    """The collectives of an exchange. ``density``: if it is not the method's default."""
    default, sends = FORMULAS[method]
    model, width = Sizes(shapes, density or default, ranks), METHODS[method].width
    if sends is None:
        return [("allreduce", width * model.all)]
    return [*sends(model), ("allreduce", width * model.uncompressed)]


def sent_by(method: str, shapes: Iterable[Sequence[int]], ranks: int, density: float | None = None) -> float:
    """Bytes that a rank sends in an exchange."""
    return sent(messages(method, shapes, ranks, density), ranks)
