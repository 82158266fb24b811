"""Samples of many things."""

from collections.abc import Sequence


def spread(numbers: Sequence[int], count: int) -> Sequence[int]:
    """At most so many of the numbers, at irregular distances: what is done to every second parameter, or to a tenth of
    the model, is done to one of these."""
    if len(numbers) <= count:
        return numbers
    return sorted({numbers[int(i * 0.6180339887 % 1 * len(numbers))] for i in range(count)})
