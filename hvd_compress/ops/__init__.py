"""The compiled operators: a typed wrapper each.

What each operator computes is written in :mod:`hvd_compress.reference`, which also takes over where the extension
was not built (slow: a warning says so once). ``COMPILED`` tells which; ``COMPILED_CUDA`` tells it for CUDA tensors,
and :func:`check_device` finds out whether there is code for a GPU of that generation.
``CPU_CAPABILITY`` is the instruction set that was chosen for this processor.

Every operator mutates its arguments and returns nothing. Tensors are of one device; a bad argument raises a
``RuntimeError`` that says what was got and what is allowed (from the compiled operators; the reference checks nothing).
"""

from ._load import COMPILED, COMPILED_CUDA, CPU_CAPABILITY, check_device
from .blocks import accumulate_select, put, select, take
from .codes import (
    codebook_decode,
    codebook_encode,
    lanes_decode,
    lanes_encode,
    moments,
    range_decode,
    range_encode,
)
from .means import means_keep, means_send
from .scales import lanes_follow, lanes_prepare

__all__ = [
    "COMPILED",
    "COMPILED_CUDA",
    "CPU_CAPABILITY",
    "accumulate_select",
    "check_device",
    "codebook_decode",
    "codebook_encode",
    "lanes_decode",
    "lanes_encode",
    "lanes_follow",
    "lanes_prepare",
    "means_keep",
    "means_send",
    "moments",
    "put",
    "range_decode",
    "range_encode",
    "select",
    "take",
]
