"""What every operator computes, in plain PyTorch: the specification.

The compiled operators (``csrc/``) are tested against these functions to the last bit, and the package
falls back on them where the extension was not built. Read these files to know what an operator does;
read ``csrc/`` only to know how it does it fast.

``blocks``: residuals, picks, and what is taken and put. ``means``: blocks' means. ``codes``: how values are written on
the wire, ``scales``: what goes beside them.
"""

from .blocks import (
    BLOCK,
    accumulate_select,
    exponential,
    mix,
    owned,
    positions,
    put,
    put_at,
    select,
    slot_start,
    take,
)
from .codes import (
    LANES,
    codebook_decode,
    codebook_encode,
    lanes_decode,
    lanes_encode,
    moments,
    pack,
    range_decode,
    range_encode,
    unpack,
)
from .means import means_keep, means_send
from .scales import lanes_follow, lanes_prepare

__all__ = [
    "BLOCK",
    "LANES",
    "accumulate_select",
    "codebook_decode",
    "codebook_encode",
    "exponential",
    "lanes_decode",
    "lanes_encode",
    "lanes_follow",
    "lanes_prepare",
    "means_keep",
    "means_send",
    "mix",
    "moments",
    "owned",
    "pack",
    "positions",
    "put",
    "put_at",
    "range_decode",
    "range_encode",
    "select",
    "slot_start",
    "take",
    "unpack",
]
