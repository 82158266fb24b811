"""Codecs: how values are encoded on the wire and averaged. Methods take a codec, or its name, as ``values=``.

====================  ==================================================  ========================================
name                  how it is averaged                                  bytes per value, sent by each of N ranks
====================  ==================================================  ========================================
``fp32``, ``fp16``    allreduce of floats                                 8 (N-1)/N, 4 (N-1)/N
``lanes4``            allreduce of 4-bit integers in lanes                16/10 (N-1)/N at N = 4 (see Lanes)
``range10``           ring of 10-bit range-based floats                   20/8 (N-1)/N
``lloyd4``            ring with a 4-bit Lloyd-Max codebook                8/8 (N-1)/N
``range10-gather``    allgather of the same codes                         10/8 (N-1)
``lloyd4-gather``     allgather of the same codes                         4/8 (N-1)
``fp16-gather``       allgather of floats; also ``fp32-gather``           2 (N-1)
====================  ==================================================  ========================================

The quantization error stays in the residual of the rank that encoded the value.
"""

import re

from .base import Averaged, Channel, Codec
from .cast import Cast
from .coded_gather import CodedGather
from .coded_ring import CodedRing
from .floats import Plain, RangeFloat
from .lanes import Lanes
from .packed import Lloyd

_ALLOWED = "fp32, fp16, lanes2 to lanes16, range4 to range16, lloyd1 to lloyd8; all but lanes also with -gather"


def codec(values: str | Codec) -> Codec:
    """The codec with this name; a :class:`Codec` is returned as it is. Raises ``ValueError`` for an unknown name or an
    unsupported number of bits, ``TypeError`` for another type."""
    if isinstance(values, Codec):
        return values
    if not isinstance(values, str):
        raise TypeError(f"values must be a codec or its name ({_ALLOWED}), got {values!r}")
    found = re.fullmatch(r"(fp(?=16|32)|lanes|range|lloyd)(\d+)(-gather)?", values)
    if not found or (found[1] == "lanes" and found[3]):
        raise ValueError(f"values must be one of {_ALLOWED}, got {values!r}")
    family, bits, gather = found[1], int(found[2]), bool(found[3])
    if family == "lanes":
        return Lanes(bits)
    if family == "fp" and not gather:
        return Cast(values)
    code = {"fp": Plain, "lloyd": Lloyd, "range": RangeFloat}[family](bits)
    return CodedGather(code) if gather else CodedRing(code)
