"""What every operator computes, in plain PyTorch: the specification.

The compiled operators (``csrc/``) are tested for bitwise equality with these functions. The package falls back to them
if the extension is not built.

``blocks``: error feedback, selection, gather and scatter. ``block_means``: blocks' means. ``codes``: quantized values.
``scales``: the scales of quantized values.
"""

from .block_means import block_means_keep, block_means_send
from .blocks import (
    BLOCK,
    OVERFLOW,
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
    usable,
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
