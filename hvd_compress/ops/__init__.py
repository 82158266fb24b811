"""The compiled operators: a typed wrapper each.

What each operator computes is written in :mod:`hvd_compress.reference`, which also takes over where the extension
was not built (slow: a warning says so once). ``COMPILED`` tells which; ``COMPILED_CUDA`` tells it for CUDA tensors,
and :func:`check_device` finds out whether there is code for a GPU of that generation.
``CPU_CAPABILITY`` is the instruction set that was chosen for this processor.

Every operator mutates its arguments and returns nothing. Tensors are of one device; a bad argument raises a
``RuntimeError`` that says what was got and what is allowed (from the compiled operators; the reference checks nothing).
"""

from ._load import COMPILED, COMPILED_CUDA, CPU_CAPABILITY, check_device
from .block_means import block_means_keep, block_means_send
from .blocks import accumulate_select, gather, scatter, select
from .codes import (
    codebook_decode,
    codebook_encode,
    lanes_decode,
    lanes_encode,
    moments,
    range_decode,
    range_encode,
)
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
