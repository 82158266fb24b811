"""Every operator in plain PyTorch: the specification. The compiled operators (``csrc/``) are tested for bitwise
equality with these functions, which the package falls back to if the extension is not built.

``blocks``: the vocabulary of all. ``accumulate``: error feedback on all entries; ``accumulate_select``: with a
selection. ``scatter``: gather and scatter. ``hadamard``: a transform of blocks. ``block_means``: blocks' means.
``codes``: quantized values; ``averages``: what becomes of them. ``scales``: the scales of quantized values.

``low_bit``, ``iwp`` and ``demo``, which nothing here imports, are the specifications of whole methods, each in one file
to copy: :func:`hvd_compress.recipes.low_bit`, :class:`hvd_compress.IWP` and :class:`hvd_compress.DeMo`.
"""

from .accumulate import accumulate
from .accumulate_select import Draw, accumulate_select, select
from .averages import codebook_mean, codebook_moments, codebook_move
from .block_means import block_means_keep, block_means_send
from .blocks import BLOCK, OVERFLOW, slots_before, usable
from .codes import (
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
from .hadamard import hadamard
from .scales import lanes_prepare, lanes_update
from .scatter import flat_positions, gather, scatter, scatter_at
