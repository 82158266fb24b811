"""The methods of ``estimate`` and ``bench``, and a formula for what each sends in a step on any number of ranks.

``scripts/lab/scaling.py`` and ``tests/lab/test_scaling.py`` compare the formulas with counted bytes.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

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
from ..codecs import Codec, codec
from ..codecs.base import Messages
from ..codecs.coded_ring import CodedRing
from ..codecs.packed import WideLloyd
from ..engine.collectives import ring_bytes
from ..papers.qsgd import Levels
from ..papers.terngrad import Ternary
from ..selection.budget import apportion


def sent(messages: Messages, ranks: int) -> float:
    """Bytes that a rank sends."""
    return sum(ring_bytes(verb, size, ranks) for verb, size in messages)


def is_compressed(shape: Sequence[int]) -> bool:
    """Whether a parameter of this shape is compressed by default."""
    return len(shape) >= 2 and math.prod(shape) >= 1024


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


def _leaders(values: str, flag: int = 0, means: bool = False) -> Sends:
    """Each rank's share of the indices, one byte each, after a header and ``flag`` bytes for each parameter; values."""

    def sends(model: Sizes) -> Messages:
        head = 4 + flag * len(model.pieces)
        indices = head + math.ceil(model.kept / model.ranks)
        return [("allgather", indices), *codec(values).messages(model.groups(means), model.ranks)]

    return sends


def _agreed(values: Codec, every_entry: bool = False) -> Sends:
    """No indices, but a hash to compare: three float64; values."""

    def sends(model: Sizes) -> Messages:
        groups = model.pieces if every_entry else model.groups()
        return [("allreduce", 24), *values.messages(groups, model.ranks)]

    return sends


def _gathered(values: str, flag: int, indices: Callable[[Sizes], int]) -> Sends:
    """Every rank's own entries, in one message: a header and ``flag`` bytes for each parameter; indices; values."""

    def sends(model: Sizes) -> Messages:
        ((verb, size),) = codec(values).messages(model.groups(), model.ranks)
        return [(verb, 4 + flag * len(model.pieces) + indices(model) + size)]

    return sends


def _byte_or_bitmap(model: Sizes) -> int:
    return min(model.kept, sum(model.pieces) // 8)


def _four_bytes(model: Sizes) -> int:
    return 4 * model.kept


def _factors(rank: int) -> Sends:
    """Float16: P and matrices that would not get smaller, after a flag; Q."""

    def sends(model: Sizes) -> Messages:
        first, second = 1, 0
        for shape in model.large:
            n, m = shape[0], math.prod(shape[1:])
            r = min(rank, n, m)
            small = r * (n + m) < n * m
            first, second = first + (r * n if small else n * m), second + (r * m if small else 0)
        return [("allreduce", 2 * first), ("allreduce", 2 * second)]

    return sends


@dataclass(frozen=True)
class Method:
    """A method with its defaults.

    Args:
        build: of named parameters and the arguments of a :class:`hvd_compress.Compressor`.
        density: by default, if it has one.
        sends: what an exchange sends of the compressed parameters; None: everything is sent as it is.
        optimizers: with which it trains well, or in whose place (docs/choosing.md).
        local_steps: steps between two exchanges.
        width: bytes of an uncompressed entry.
    """

    build: Callable[..., Compressor]
    density: float | None = None
    sends: Sends | None = None
    optimizers: tuple[str, ...] = ("sgd",)
    local_steps: int = 1
    width: int = 4


OPTIMIZERS = ("sgd", "adamw", "muon")
_ANY, _ADAM = OPTIMIZERS, ("sgd", "adamw")
_low_bit = partial(Quantized, bits=2, dense_values="fp16")
METHODS: dict[str, Method] = {
    "low_bit": Method(_low_bit, None, _agreed(CodedRing(WideLloyd(2)), every_entry=True), _ANY, local_steps=3, width=2),
    "DeMo": Method(DeMo, 1 / 16, _leaders("lloyd4", flag=1), _ADAM),
    "IWP": Method(IWP, 1 / 32, _leaders("lanes4", means=True)),
    "IWP, lloyd4": Method(partial(IWP, values="lloyd4"), 1 / 32, _leaders("lloyd4", means=True)),
    "FFT": Method(FFT, 1 / 32, _leaders("lanes4")),
    "MIPD": Method(MIPD, 1 / 64, _agreed(codec("lanes4"))),
    "SlimDP": Method(SlimDP, 1 / 32, _agreed(codec("lanes4"))),
    "MP2": Method(MP2, 1 / 9, _agreed(codec("lanes4"))),
    "FFT, gather": Method(partial(FFT, exchange="gather"), 1 / 32, _gathered("range10-gather", 0, _byte_or_bitmap)),
    "DeMo, gather": Method(
        partial(DeMo, exchange="gather"), 1 / 64, _gathered("range10-gather", 1, _byte_or_bitmap), _ADAM
    ),
    "TopK": Method(TopK, 1 / 256, _gathered("fp32-gather", 0, _four_bytes)),
    "DGC": Method(DGC, 1 / 1000, _gathered("fp32-gather", 4, _four_bytes)),
    "PowerSGD": Method(PowerSGD, None, _factors(4)),
    "Quantized": Method(Quantized, None, _agreed(CodedRing(WideLloyd(4)), every_entry=True), _ADAM),
    "QSGD": Method(QSGD, None, _agreed(Levels(4), every_entry=True), _ADAM),
    "TernGrad": Method(TernGrad, None, _agreed(Ternary(2.5), every_entry=True), _ADAM),
    "dense": Method(NoCompression, optimizers=_ANY),
    "fp16": Method(partial(NoCompression, values="fp16"), optimizers=_ANY, width=2),
}
BASELINES = ("dense", "fp16")
#: What docs/choosing.md recommends for each optimizer, the first choice first.
ADVISED = {"muon": ("low_bit",), "adamw": ("low_bit", "DeMo"), "sgd": ("DeMo", "IWP")}


def messages(method: str, shapes: Iterable[Sequence[int]], ranks: int, density: float | None = None) -> Messages:
    """The collectives of an exchange. ``density``: if it is not the method's default."""
    known = METHODS[method]
    model = Sizes(shapes, density or known.density, ranks)
    if known.sends is None:
        return [("allreduce", known.width * model.all)]
    return [*known.sends(model), ("allreduce", known.width * model.uncompressed)]
