"""Typed wrappers of the compiled operators, which are specified in :mod:`hvd_compress.reference`.

If the extension is not built, the reference runs instead, slowly, and a warning is given at import. ``COMPILED`` and
``COMPILED_CUDA`` tell whether the operators for CPU and CUDA tensors are compiled, ``CPU_CAPABILITY`` names the
instruction set in use, and :func:`check_device` raises if the CUDA operators were not built for a GPU.

Every operator writes to its arguments and returns None. All tensors are on one device. The compiled operators raise
``RuntimeError`` for a wrong argument; the reference checks nothing.
"""

from ._load import COMPILED, COMPILED_CUDA, CPU_CAPABILITY, check_device
from .block_means import block_means_keep, block_means_send
from .blocks import accumulate_select, gather, scatter, select
from .codes import codebook_decode, codebook_encode, lanes_decode, lanes_encode, moments, range_decode, range_encode
from .scales import lanes_prepare, lanes_update

__all__ = [
    "COMPILED",
    "COMPILED_CUDA",
    "CPU_CAPABILITY",
    "accumulate_select",
    "block_means_keep",
    "block_means_send",
    "check_device",
    "codebook_decode",
    "codebook_encode",
    "gather",
    "lanes_decode",
    "lanes_encode",
    "lanes_prepare",
    "lanes_update",
    "moments",
    "range_decode",
    "range_encode",
    "scatter",
    "select",
]
