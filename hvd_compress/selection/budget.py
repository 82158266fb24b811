"""Divides a bucket's slots among its parameters: integers in proportion to weights, each with an upper limit."""

from collections.abc import Sequence

#: The largest share of a parameter relative to its size, and the inverse of the smallest.
SPREAD = 4.0


def apportion(total: int, weights: Sequence[float], limits: Sequence[int]) -> list[int]:
    """Splits ``total`` slots in proportion to ``weights``; none above its limit, each at least 1 if the total allows.
    The parts add up to ``min(total, sum(limits))``. Equal inputs give equal results on all ranks; remainders go to the
    largest fractions, the first among equals."""
    total = min(total, sum(limits))
    if total < len(weights):
        # Fewer slots than parameters: the heaviest get one each.
        chosen = set(sorted(range(len(weights)), key=lambda i: (-weights[i], i))[:total])
        return [int(i in chosen) for i in range(len(weights))]
    count = range(len(weights))
    mass = sum(weights)
    parts = [min(max(int(total * weights[i] / mass), 1), limits[i]) for i in count]
    fraction = [total * weight / mass % 1.0 for weight in weights]
    while sum(parts) > total:
        parts[max(count, key=lambda i: (parts[i], -i))] -= 1
    while (left := total - sum(parts)) > 0:
        # Slots left over by limits and rounding go to parameters below their limit.
        room = [i for i in count if parts[i] < limits[i]]
        if left <= len(room):
            for i in sorted(room, key=lambda i: (-fraction[i], i))[:left]:
                parts[i] += 1
        else:
            mass = sum(weights[i] for i in room)
            for i in room:
                parts[i] += min(max(int(left * weights[i] / mass), 1), limits[i] - parts[i], total - sum(parts))
    return parts


def shares(importance: Sequence[float], sizes: Sequence[int], spread: float = SPREAD) -> list[float]:
    """Weights for :func:`apportion`: each parameter's size times its mean importance relative to the mean of all,
    limited to between 1/spread and spread."""
    whole = sum(importance) / sum(sizes)
    if not whole > 0.0:
        return [float(size) for size in sizes]
    density = [part / size / whole for part, size in zip(importance, sizes, strict=True)]
    return [size * min(max(ratio, 1.0 / spread), spread) for size, ratio in zip(sizes, density, strict=True)]
