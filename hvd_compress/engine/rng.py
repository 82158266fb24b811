"""Randomness shared by all ranks without communication: hashes of counters, no hidden generator state."""

_MASK = 0xFFFFFFFFFFFFFFFF


def derive(*counters: int) -> int:
    """A 31-bit key from integers such as ``(seed, step, bucket)``, by SplitMix64."""
    state = 0
    for counter in counters:
        state = ((state ^ (counter & _MASK)) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 33


def permutation(key: int, count: int) -> list[int]:
    """A random permutation of ``range(count)`` that depends on ``key`` only (Fisher-Yates)."""
    order = list(range(count))
    for last in range(count - 1, 0, -1):
        other = derive(key, last) % (last + 1)
        order[last], order[other] = order[other], order[last]
    return order
