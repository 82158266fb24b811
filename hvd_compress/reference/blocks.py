"""Blocks of 256 entries, their slots, and random numbers: the vocabulary of the operators.

block
    256 consecutive entries of a piece in memory order. The last block may be padded.
piece
    a parameter, or a part of one, and its blocks within a bucket's flat residual.
slot
    one entry to be sent. A piece of ``blocks`` blocks has ``slots`` slots. Block ``b`` has the slots from
    ``slot_start(b)`` to ``slot_start(b + 1)``: any number of slots is spread evenly, and ``phase`` rotates the
    remainder from step to step.
index
    the position of a slot's entry within its block: one byte.
leader
    the rank that selects a slot's entry, by its own residual. Slots are assigned to ranks round-robin in runs of
    ``run`` slots. ``position``, 0 to ``ranks - 1``, is the rank's place in this order; it changes from step to step.
"""

from typing import TypeVar

import torch
from torch import Tensor

Word = TypeVar("Word", int, Tensor)

BLOCK = 256
#: From here on a gradient counts as infinite: its square, and so a norm, overflows float32.
OVERFLOW = 2.0**64
MASK = 2**32 - 1


def mix(value: Word, key: int) -> Word:
    """A 32-bit hash of ``value`` with ``key``: two multiply-xorshift rounds. For a tensor: int64, below 2**32."""
    value = (value * 0x9E3779B1 + key) & MASK
    value = ((value ^ (value >> 16)) * 0x21F0AAAD) & MASK
    value = ((value ^ (value >> 15)) * 0x735A2D97) & MASK
    return value ^ (value >> 15)


def usable(gradient: Tensor, overflow: float = OVERFLOW) -> Tensor:
    """Whether each entry of a gradient may enter a state, bool: it is finite, and below ``overflow`` in magnitude."""
    return gradient.abs() < overflow


def exponential(bits: Tensor) -> Tensor:
    """Draws from an exponential distribution (in units of ln 2) from 32 random ``bits`` each: float32, > 0.

    ``-log2(u)``, with a parabola for the logarithm of the mantissa (error below 0.009). All steps are exact or rounded
    by IEEE 754, so the result does not depend on a library's ``log``.
    """
    uniform = ((bits >> 9).float() + 0.5) * 2.0**-23
    word = uniform.view(torch.int32)
    exponent = (127 - (word >> 23)).float()
    part = ((word & 0x7FFFFF) | 0x3F800000).view(torch.float32) - 1.0
    return (exponent - (part + (part * (1.0 - part)) * 0.3466)).clamp_(min=1e-6)


def slot_start(block: Tensor, slots: int, blocks: int, phase: int) -> Tensor:
    """The first slot of ``block`` (int64 tensor) within its piece; ``slot_start(blocks)`` is ``slots``."""
    return (block * slots + phase % blocks) // blocks


def slots_before(slot: Tensor, run: int, ranks: int, position: int) -> Tensor:
    """The number of the bucket's slots before ``slot`` that belong to the rank at ``position``."""
    turn = run * ranks
    return (slot // turn) * run + (slot % turn - position * run).clamp(0, run)
