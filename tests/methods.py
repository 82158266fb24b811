"""Every method with the options that change how it works, for the invariants."""

from functools import partial

import pytest

from hvd_compress import (
    DGC,
    FFT,
    IWP,
    MIPD,
    MP2,
    QSGD,
    DeMo,
    NoCompression,
    PowerSGD,
    Quantized,
    SlimDP,
    TernGrad,
    TopK,
)

# Two buckets for the harness's model: one of two parameters, one of one.
SMALL = dict(bucket_mb=0.08)

# Nothing is forgotten: methods/test_demo.py has the decay and the sign.
_LINEAR = dict(decay=1.0, sign=False)


class Guessing(MP2):
    """MP2 with predictions. ``guess``: a function of the windows in place of the predictor. ``gate``: whether it may
    close; otherwise it is always open."""

    def __init__(self, *args, guess=None, gate=False, **options):
        self._guess, self._gate = guess, gate
        super().__init__(*args, prediction=True, **options)

    def sparse_work(self, bucket, sending):
        work = super().sparse_work(bucket, sending)
        if not self._gate:
            work.prediction.opened = lambda: [True] * len(bucket.pieces)
        if self._guess is not None:
            work.prediction.predict = lambda index, windows, seen: self._guess(seen)
        return work


METHODS = {
    "iwp": partial(IWP, density=1 / 64),
    "iwp-fp16": partial(IWP, density=1 / 64, values="fp16"),
    "iwp-fp32": partial(IWP, density=1 / 64, values="fp32"),
    "iwp-one-leader": partial(IWP, density=1 / 16, leaders=1),
    "iwp-no-means": partial(IWP, density=1 / 32, block_means=False),
    "iwp-sparse": partial(IWP, density=1 / 1000, explore=0.5),
    "iwp-half": partial(IWP, density=0.5, leaders=2),
    "iwp-dense-fp16": partial(IWP, density=1 / 64, dense_values="fp16"),
    "iwp-lanes2": partial(IWP, density=1 / 16, values="lanes2"),
    "iwp-lanes4": partial(IWP, density=1 / 16, budget_interval=3),
    "iwp-lanes16": partial(IWP, density=1 / 16, values="lanes16"),
    "iwp-range8": partial(IWP, density=1 / 16, values="range8"),
    "iwp-range10-gather": partial(IWP, density=1 / 16, values="range10-gather"),
    "iwp-lloyd1": partial(IWP, density=1 / 16, values="lloyd1"),
    "iwp-lloyd4": partial(IWP, density=1 / 16, values="lloyd4", budget_interval=3),
    "iwp-fp16-gather": partial(IWP, density=1 / 16, values="fp16-gather"),
    "fft": partial(FFT, density=1 / 32),
    "fft-range10": partial(FFT, density=1 / 16, values="range10", budget_interval=3),
    "fft-gather": partial(FFT, density=1 / 32, exchange="gather"),
    "fft-gather-bitmap": partial(FFT, density=0.15, exchange="gather", values="fp32-gather"),
    "demo": partial(DeMo, **_LINEAR),
    "demo-range8": partial(DeMo, density=1 / 64, values="range8", budget_interval=3, **_LINEAR),
    "demo-gather": partial(DeMo, exchange="gather", **_LINEAR),
    "mipd": partial(MIPD, density=1 / 16),
    "mipd-lloyd4": partial(MIPD, density=1 / 16, values="lloyd4", budget_interval=3),
    "mipd-whole": partial(MIPD, density=0.6),
    "slimdp": partial(SlimDP, density=1 / 32),
    "slimdp-fp32": partial(SlimDP, density=1 / 20, values="fp32", core=0.8, budget_interval=3),
    "mp2": partial(MP2, prediction=True),
    "mp2-guessing": partial(Guessing, density=1 / 4, values="fp32"),
    "mp2-silent": partial(MP2),
    "topk": partial(TopK, density=1 / 64),
    "topk-range8": partial(TopK, density=1 / 300, values="range8-gather"),
    "dgc": partial(DGC, density=1 / 64, momentum=0.0),
    "quantized": partial(Quantized),
    "quantized-1": partial(Quantized, bits=1, run=256),
    "quantized-8": partial(Quantized, bits=8, run=100),
    "quantized-forgetful": partial(Quantized, bits=2, error_feedback=False),
    "qsgd": partial(QSGD),
    "qsgd-feedback": partial(QSGD, bits=8, error_feedback=True),
    "terngrad": partial(TernGrad),
    "terngrad-feedback": partial(TernGrad, clip=10.0, error_feedback=True),
    "powersgd": partial(PowerSGD, rank=2, values="fp16"),
    "powersgd-fp32": partial(PowerSGD, rank=3, values="fp32"),
    "none": partial(NoCompression),
    "none-fp16": partial(NoCompression, values="fp16"),
}

#: One of every class, selection, codec and exchange.
KINDS = {
    name: METHODS[name]
    for name in (
        *("iwp", "iwp-fp16", "iwp-lloyd4", "iwp-range10-gather", "fft-range10", "fft-gather-bitmap"),
        *("demo", "mipd-lloyd4", "slimdp-fp32", "mp2", "mp2-guessing", "topk", "dgc"),
        *("quantized-1", "quantized-8", "qsgd-feedback", "terngrad", "powersgd", "powersgd-fp32", "none-fp16"),
    )
} | {
    "iwp-momentum": partial(IWP, density=1 / 16, momentum=0.9, budget_interval=2),
    "iwp-everything": partial(IWP, density=1.0, dense_values="fp16"),
    "demo-orthogonal": partial(DeMo, orthogonal=True, subtract=0.5),
}


def unless_kind(name: str) -> tuple[pytest.MarkDecorator, ...]:
    """The marks of a test of a rule that does not depend on the codec: those of METHODS beside KINDS need --all."""
    return () if name in KINDS else (pytest.mark.slow,)


#: The names of METHODS, as values of a parameter of such a test.
EACH = [pytest.param(name, marks=unless_kind(name)) for name in METHODS]

#: Those that, as in their papers, lose what they do not send.
FORGETFUL = ("quantized-forgetful", "qsgd", "terngrad")
#: Those that send all that they receive.
WHOLE = ("none", "none-fp16")
#: Those that keep no residual.
WITHOUT_RESIDUAL = (*FORGETFUL, *WHOLE)

_NO_DENSITY = {"density", "budget_interval", "warmup_steps"}
#: Options of the others that a class does not have.
_UNKNOWN = {
    TopK: {"budget_interval"},
    DGC: {"budget_interval"},
    MP2: _NO_DENSITY,
    Guessing: _NO_DENSITY,
    Quantized: {*_NO_DENSITY, "momentum", "values"},
    QSGD: {*_NO_DENSITY, "momentum", "values"},
    TernGrad: {*_NO_DENSITY, "momentum", "values"},
    PowerSGD: {*_NO_DENSITY, "momentum"},
    NoCompression: {*_NO_DENSITY, "momentum"},
}


def fitting(method: partial, options: dict) -> dict:
    """The options that the method's class accepts."""
    return {key: value for key, value in options.items() if key not in _UNKNOWN.get(method.func, ())}


_LONG = dict(momentum=0.9, density=1 / 64, warmup_steps=100)

#: One of each class, with the options of a long training.
TRAINED = {
    "iwp": partial(IWP, budget_interval=50, **_LONG),
    "fft": partial(FFT, budget_interval=50, **_LONG),
    "demo": partial(DeMo, budget_interval=50, **_LONG, **_LINEAR),
    "mipd": partial(MIPD, budget_interval=50, **_LONG),
    "slimdp": partial(SlimDP, budget_interval=50, **_LONG),
    "mp2": partial(Guessing, momentum=0.9),
    "topk": partial(TopK, **_LONG),
    "dgc": partial(DGC, **_LONG),
    "quantized": partial(Quantized),
    "qsgd": partial(QSGD),
    "terngrad": partial(TernGrad),
    "powersgd": partial(PowerSGD, rank=2),
    "none": partial(NoCompression),
}

#: One of each class that can send everything exactly: dense training.
EXACT = {
    "iwp": partial(IWP, density=1.0, values="fp32"),
    "fft": partial(FFT, density=1.0, values="fp32"),
    "demo": partial(DeMo, density=1.0, values="fp32", **_LINEAR),
    "mipd": partial(MIPD, density=1.0, values="fp32"),
    "slimdp": partial(SlimDP, density=1.0, values="fp32"),
    "mp2": partial(MP2, density=1.0, values="fp32"),
    "topk": partial(TopK, density=1.0),
    "dgc": partial(DGC, density=1.0, momentum=0.0),
    "none": partial(NoCompression),
}
