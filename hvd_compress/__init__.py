"""Gradient compression for data-parallel training on Horovod: one object passed as ``compression=``."""

from ._version import __version__
from .compressor import Compressor
from .methods.fft import FFT
from .methods.iwp import IWP
from .methods.mipd import MIPD

__all__ = ["FFT", "IWP", "MIPD", "Compressor", "__version__"]
