"""What every operator computes, in plain PyTorch: the specification.

The compiled operators (``csrc/``) are tested against these functions to the last bit, and the package
falls back on them where the extension was not built. Read these files to know what an operator does;
read ``csrc/`` only to know how it does it fast.

``blocks``: residuals, picks, and what is taken and scatter. ``means``: blocks' means. ``codes``: how values are written on
the wire, ``scales``: what goes beside them.
"""

from .block_means import block_means_keep, block_means_send
from .blocks import (
    BLOCK,
    accumulate_select,
    exponential,
    flat_positions,
    gather,
    mix,
    scatter,
    scatter_at,
    select,
    slot_start,
    slots_before,
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
from .scales import lanes_prepare, lanes_update

__all__ = [
    "BLOCK",
    "LANES",
    "accumulate_select",
    "block_means_keep",
    "block_means_send",
    "codebook_decode",
    "codebook_encode",
    "exponential",
    "flat_positions",
    "gather",
    "lanes_decode",
    "lanes_encode",
    "lanes_prepare",
    "lanes_update",
    "mix",
    "moments",
    "pack",
    "range_decode",
    "range_encode",
    "scatter",
    "scatter_at",
    "select",
    "slot_start",
    "slots_before",
    "unpack",
]
