"""scripts/lab/road.py: what it counts, and its calls."""

import inspect

import pytest
import road

from hvd_compress.engine.collectives import ring_bytes


def test_a_function_counts_once_and_others_code_not_at_all():
    with road.Road() as found:
        sum(ring_bytes("allgather", size, 4) for size in map(int, "123"))
        inspect.signature(ring_bytes)
    assert found.functions == {ring_bytes.__code__} and len(found.files) == 1
    assert found.lines == inspect.getsource(ring_bytes).count("\n")


@pytest.mark.parametrize("name", road.TRIPS)
def test_every_call_is_followed_into_the_engine(name):
    found = road.TRIPS[name]()
    assert any("/engine/" in file for file in found.files)
    assert len(found.files) < len(found.functions) < found.lines
