"""A few of many parameters, to look at."""

from collections.abc import Sequence

#: The most parameters to put a hook on or to compare in each step: it takes microseconds for each of them.
PROBES = 32


def spread(numbers: Sequence[int], count: int) -> Sequence[int]:
    """Returns at most ``count`` of the numbers, at irregular distances, so that a change of every second parameter, or
    of a tenth of the model, changes one of them."""
    if len(numbers) <= count:
        return numbers
    return sorted({numbers[int(i * 0.6180339887 % 1 * len(numbers))] for i in range(count)})
