"""Gradient compression for data-parallel training on Horovod: one object passed as ``compression=``."""

from .methods import extrapolation
from ._version import __version__
from .methods.base import Compressor
from .methods.fft import FFT
from .methods.iwp import IWP
from .methods.mipd import MIPD
from .methods.mp2 import MP2
from .methods.quantized import QSGD, TernGrad
from .methods.slim_dp import SlimDP
from .methods.topk import DGC, TopK

__all__ = [
    "DGC",
    "FFT",
    "IWP",
    "MIPD",
    "MP2",
    "QSGD",
    "Compressor",
    "SlimDP",
    "TernGrad",
    "TopK",
    "__version__",
    "extrapolation",
]
