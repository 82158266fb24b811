"""Gradient compression for data-parallel training on Horovod: one object passed as ``compression=``."""

from ._version import __version__
from .compressor import Compressor
from .methods.iwp import IWP

__all__ = ["IWP", "Compressor", "__version__"]
