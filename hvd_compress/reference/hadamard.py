"""The Walsh-Hadamard transform of blocks: an orthonormal change of basis that is its own inverse."""

from torch import Tensor

from .blocks import BLOCK

#: A coefficient is at most so many times a block's largest magnitude.
GAIN = BLOCK**0.5


def hadamard(values: Tensor) -> None:
    """Transform every block: float32, (blocks * 256,), in natural order.

    Entries whose positions differ in one bit are replaced by their sum and their difference, for the lowest bit of the
    position first; then all are divided by 16. Each step is exact or rounded by IEEE 754, so that all back ends agree.
    """
    blocks = values.view(-1, BLOCK)
    half = 1
    while half < BLOCK:
        lower, upper = blocks.view(-1, BLOCK // (2 * half), 2, half).unbind(2)
        total, difference = lower + upper, lower - upper
        lower.copy_(total)
        upper.copy_(difference)
        half *= 2
    values /= GAIN
