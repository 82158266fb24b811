"""The parameters that are looked at to find gradients that contain the last average. States that are saved between an
average and its step: checkpoints/test_one_rank.py."""

import pytest

from hvd_compress.engine.spread import PROBES, spread


@pytest.mark.parametrize("count", [1, 32, 33, 64, 100, 1000, 4001])
def test_what_is_done_to_a_part_of_the_model_is_seen(count: int) -> None:
    """The parameters that are looked at: few, some of them in every second, third and fourth, and in every tenth of the
    model."""
    numbers = range(count)
    seen = spread(numbers, PROBES)
    assert len(seen) == len(set(seen)) <= 32 and set(seen) <= set(numbers)
    assert list(seen) == list(numbers) or len(seen) > 20
    for period in (2, 3, 4):
        assert {number % period for number in seen} == {number % period for number in numbers}
    assert {number * 10 // count for number in seen} == {number * 10 // count for number in numbers}
