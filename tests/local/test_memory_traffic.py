"""The bytes that the operators of one exchange read and write, an entry: what would cross memory without caches."""

import pytest
from bench_round import Rank

#: By recipe, at 4 ranks. Lower them when they fall.
MOST = {
    "low_bit": 102.3,
    "low_bit, length kept": 86.3,
    "low_bit, delay 1": 134.3,
    "diloco": 108.1,
    "sparseloco": 197.0,
}


@pytest.mark.parametrize(("recipe", "most"), MOST.items())
def test_bytes_through_memory(recipe, most):
    rank = Rank(recipe, 1, 4)
    rank.step()
    traffic = rank.traffic()
    assert 0.99 * most < sum(traffic.values()) <= most, traffic
