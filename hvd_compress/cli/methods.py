"""The methods of ``estimate`` and ``bench``."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import hvd_compress
from hvd_compress import Compressor

Shape = tuple[int, ...]


def is_compressed(shape: Sequence[int]) -> bool:
    """Whether a parameter of this shape is compressed by default."""
    return len(shape) >= 2 and math.prod(shape) >= 1024


def _sides(shape: Shape) -> int:
    return shape[0] + math.prod(shape[1:])


@dataclass(frozen=True)
class Method:
    """A method with its defaults.

    Args:
        build: of named parameters and the arguments of a :class:`hvd_compress.Compressor`.
        optimizers: with which it trains well, or in whose place (docs/choosing.md).
        local_steps: steps between two exchanges.
        width: bytes of an uncompressed entry.
        trips: messages between hosts that a step waits for, one after the other; those of all buckets at the same time.
        gathers: whether each rank receives the payloads of all others, so that its work grows with the ranks.
        size: of a parameter's shape: its share of the payload is in proportion to it.
    """

    build: Callable[..., Compressor]
    optimizers: tuple[str, ...] = ("sgd",)
    local_steps: int = 1
    width: int = 4
    trips: int = 2
    gathers: bool = False
    size: Callable[[Shape], int] = math.prod


_ANY, _ADAM = ("sgd", "adamw", "muon"), ("sgd", "adamw")
METHODS: dict[str, Method] = {
    "low_bit": Method(partial(hvd_compress.Quantized, bits=2, dense_values="fp16"), _ANY, local_steps=3, width=2),
    "DeMo": Method(hvd_compress.DeMo, _ADAM, trips=3),
    "IWP": Method(hvd_compress.IWP, trips=3),
    "IWP, lloyd4": Method(partial(hvd_compress.IWP, values="lloyd4"), trips=3),
    "FFT": Method(hvd_compress.FFT, trips=3),
    "MIPD": Method(hvd_compress.MIPD, trips=3),
    "SlimDP": Method(hvd_compress.SlimDP, trips=3),
    "MP2": Method(hvd_compress.MP2, trips=3),
    "FFT, gather": Method(partial(hvd_compress.FFT, exchange="gather"), gathers=True),
    "DeMo, gather": Method(partial(hvd_compress.DeMo, exchange="gather", density=1 / 64), _ADAM, gathers=True),
    "TopK": Method(hvd_compress.TopK, gathers=True),
    "DGC": Method(hvd_compress.DGC, gathers=True),
    "PowerSGD": Method(hvd_compress.PowerSGD, size=_sides, trips=4),
    "Quantized": Method(hvd_compress.Quantized, _ADAM),
    "QSGD": Method(hvd_compress.QSGD, _ADAM, gathers=True),
    "TernGrad": Method(hvd_compress.TernGrad, _ADAM, trips=3),
    "dense": Method(hvd_compress.NoCompression, _ANY),
    "fp16": Method(partial(hvd_compress.NoCompression, values="fp16"), _ANY, width=2),
}
BASELINES = ("dense", "fp16")
#: Bytes that a method holds a compressed entry, beside weights and gradients, and that it takes in addition an entry of
#: a bucket that it exchanges, without what it gathers from other ranks: as scripts/lab/bench_memory.py has measured.
MEMORY = {
    "low_bit": (8.4, 3.1), "DeMo": (4.9, 0.3), "IWP": (4.5, 0.1), "IWP, lloyd4": (4.5, 0.1), "FFT": (8.4, 5.5),
    "MIPD": (12.4, 9.0), "SlimDP": (16.7, 1.4), "MP2": (14.4, 5.2), "FFT, gather": (8.6, 7.8),
    "DeMo, gather": (4.3, 14.0), "TopK": (4.1, 12.3), "DGC": (8.0, 12.2), "PowerSGD": (8.0, 17.0),
    "Quantized": (6.2, 2.2), "QSGD": (16.5, 2.2), "TernGrad": (12.5, 22.0), "dense": (0.0, 0.0), "fp16": (0.0, 0.0),
}  # fmt: skip
#: The advice of docs/choosing.md for each optimizer, the first choice first.
ADVISED = {"muon": ("low_bit",), "adamw": ("low_bit", "DeMo"), "sgd": ("DeMo", "IWP")}
