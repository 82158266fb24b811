"""Floats packed into bytes: plain ones, and range-based floats of any number of bits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..engine.arguments import check_integer
from ..reference.codes import store
from .packed import Code

# The most steps in which a value beyond a dtype's range is sent.
_PATIENCE = 64


def drop_excess(quantization_error: Tensor, limit: float) -> None:
    """Limits the errors of values that were clipped to ``limit`` to what 64 further steps can send."""
    most = min(_PATIENCE * limit, torch.finfo(torch.float32).max)
    quantization_error.clamp_(-most, most)


@dataclass(frozen=True)
class Plain(Code):
    """Floats of 16 or 32 bits, for messages that are not summed on the way. A value beyond their range is sent in up to
    65 steps; the rest is dropped."""

    bits: int
    family = "fp"
    peak = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", check_integer("bits of fp", self.bits, 16, 32))
        if self.bits not in (16, 32):
            raise ValueError(f"bits of fp must be 16 or 32, got {self.bits}")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.bits == 16 else torch.float32

    def size(self, count: int) -> int:
        return count * self.bits // 8

    def encode(self, values: Tensor, scale: Tensor, kind: Tensor, edges: Tensor, codes: Tensor, error: Tensor) -> None:
        limit = torch.finfo(self.dtype).max
        written = values.clamp(-limit, limit).to(self.dtype)
        codes.copy_(written.view(torch.uint8))
        torch.sub(values, written, out=error)
        drop_excess(error, limit)

    def decode(self, codes: Tensor, scale: Tensor, kind: Tensor, edges: Tensor, values: Tensor, add: bool) -> None:
        # A copy, because codes may be unaligned in a message.
        store(values, codes.clone().view(self.dtype), add)


# Bits of fraction with the least relative error on Student-t(3) values (tests/codecs/test_codecs.py).
_MANTISSA = {4: 1, 5: 1, 6: 2, 7: 3, 8: 4, 9: 4, 10: 5, 11: 6, 12: 7, 13: 8, 14: 9, 15: 10, 16: 11}


@dataclass(frozen=True)
class RangeFloat(Code):
    """Range-based floats of ``bits`` bits (4 to 16), after Wang et al., HPDC 2020: floats with ``mantissa`` bits of
    fraction, in a window of exponents that ends at the group's largest magnitude. The exact format is ours."""

    bits: int
    mantissa: int = 0
    family = "range"
    peak = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", check_integer("bits of range", self.bits, 4, 16))
        mantissa = check_integer("mantissa", self.mantissa) or _MANTISSA[self.bits]
        least, other = self.least_mantissa(self.bits), "0 for the default"
        object.__setattr__(self, "mantissa", check_integer("mantissa", mantissa, least, 22, other=other))

    @staticmethod
    def least_mantissa(bits: int) -> int:
        """The least bits of fraction: with fewer, the window would be wider than float32's 254 exponents."""
        return max(1, (((1 << bits) - 1) // 2 // 254).bit_length())

    @property
    def positive(self) -> int:
        """The number of codes for positive values, and of codes for negative values."""
        return ((1 << self.bits) - 1) // 2

    def base(self, scale: Tensor) -> Tensor:
        """The bits of the window's first magnitude, such that the last one is the scale: int64, (groups,)."""
        top = scale.float().view(torch.int32).long() >> (23 - self.mantissa)
        return (top - self.positive + 1).clamp(min=1)

    def encode(self, values: Tensor, scale: Tensor, kind: Tensor, edges: Tensor, codes: Tensor, error: Tensor) -> None:
        ops.range_encode(values, self.base(scale), edges, codes, error, self.bits, self.mantissa, self.positive)

    def decode(self, codes: Tensor, scale: Tensor, kind: Tensor, edges: Tensor, values: Tensor, add: bool) -> None:
        ops.range_decode(codes, self.base(scale), edges, values, self.bits, self.mantissa, self.positive, add)
