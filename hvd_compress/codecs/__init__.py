"""How values are written on the wire, and averaged: what every method takes as ``values=``.

====================  ==================================================  ========================================
name                  how it is summed                                    bytes a value, sent by each of N ranks
====================  ==================================================  ========================================
``fp32``, ``fp16``    Horovod's ring adds floats                          8 (N-1)/N, 4 (N-1)/N
``lanes4``            Horovod's ring adds integers of 4 bits in lanes     16/10 (N-1)/N at N = 4 (see Lanes)
``range10``           coded ring of 10-bit range-based floats             20/8 (N-1)/N
``lloyd4``            coded ring of a 4-bit Lloyd-Max codebook            8/8 (N-1)/N
``range10-gather``    every rank's codes to every other                   10/8 (N-1)
``lloyd4-gather``     the same                                            4/8 (N-1)
``fp16-gather``       the same; and ``fp32-gather``                       2 (N-1)
====================  ==================================================  ========================================

Whatever a code loses of a value stays in the residual of the rank that lost it.
"""

import re

from .base import Channel, Codec
from .cast import Cast
from .lanes import Lanes
from .packed import Lloyd, Plain, RangeFloat
from .packed_channels import CodedGather, CodedRing

__all__ = ["Cast", "Channel", "Codec", "CodedGather", "CodedRing", "Lanes", "Lloyd", "Plain", "RangeFloat", "codec"]

_ALLOWED = "fp32, fp16, lanes2 to lanes16, range4 to range16, lloyd1 to lloyd8; all but lanes also with -gather"


def codec(values: str | Codec) -> Codec:
    """The codec of that name (or itself); raises ``ValueError`` for an unknown name or a number of bits out of range,
    ``TypeError`` for anything else."""
    if isinstance(values, Codec):
        return values
    if not isinstance(values, str):
        raise TypeError(f"values must be a codec or its name ({_ALLOWED}), got {values!r}")
    found = re.fullmatch(r"(fp(?=16|32)|lanes|range|lloyd)(\d+)(-gather)?", values)
    if not found or (found[1] == "lanes" and found[3]):
        raise ValueError(f"values must be one of {_ALLOWED}; got {values!r}")
    family, bits, gather = found[1], int(found[2]), bool(found[3])
    if family == "lanes":
        return Lanes(bits)
    if family == "fp" and not gather:
        return Cast(values)
    code = {"fp": Plain, "lloyd": Lloyd, "range": RangeFloat}[family](bits)
    return CodedGather(code) if gather else CodedRing(code)
