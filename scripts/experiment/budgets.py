"""The density at which a method sends a given share of the dense bytes, found by measuring.

What a step sends besides the entries chosen (tensors that travel dense, scales, padding) differs from method to method
and from model to model, so no formula knows it. But the whole is nearly affine in the density, so that a few
measurements suffice.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

# Where the line is taken from: low enough for the budgets that matter, far enough apart to be steep.
PROBES = (1 / 64, 1 / 8)

Measure = Callable[[float], float]  # from a density to the share of the dense bytes
Point = tuple[float, float]  # density, share


class Unreachable(Exception):
    """No density gives this share; says why."""


def fraction(text: str) -> float:
    """A budget such as 1/64 or 0.01; ``ValueError`` if it is no share."""
    try:
        value = float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        value = 0.0
    if not 0.0 < value <= 1.0:
        raise ValueError(f"a budget is a share of the dense bytes, as 1/64 or 0.01; got {text!r}")
    return value


def find(measure: Measure, target: float, tolerance: float = 0.01) -> Point:
    """The density that gives the share ``target``, and the share measured there.

    One correction where it is off by more than ``tolerance`` of the target; the better of the two then.
    """
    low, high = ((density, measure(density)) for density in PROBES)
    density = _solve(low, high, target)
    guess = (density, measure(density))
    if abs(guess[1] - target) <= tolerance * target:
        return guess
    nearer = min(low, high, key=lambda point: abs(point[1] - guess[1]))
    try:
        density = _solve(nearer, guess, target)
    except Unreachable:
        return guess
    return min(guess, (density, measure(density)), key=lambda point: abs(point[1] - target))


def _solve(one: Point, other: Point, target: float) -> float:
    """Where the line through two points reaches ``target``; to four digits, so that it can be read and typed."""
    slope = (other[1] - one[1]) / (other[0] - one[0]) if other[0] != one[0] else 0.0
    if not slope > 0.0:
        raise Unreachable("its bytes do not grow with the density")
    density = one[0] + (target - one[1]) / slope
    if density > 1.0:
        raise Unreachable("even all entries are less")
    if density <= 0.0:
        raise Unreachable("what it sends besides the chosen entries is more")
    return float(f"{density:.4g}")
