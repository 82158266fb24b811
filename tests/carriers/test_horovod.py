"""Horovod's registries, and what its thread is given, without Horovod."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from hvd_compress.carriers.horovod import HorovodCollectives, _Registries
from hvd_compress.engine.collectives import Request


class _Method:
    """As far as a registry sees it."""


def _added(registry, method):
    number = registry.number()
    registry.add(method, number)
    return number


def test_compressors_of_all_process_sets_know_each_other_and_go_on_when_the_ranks_change():
    registries, sets = _Registries(), [_Method(), _Method()]
    first, second, third = _Method(), _Method(), _Method()
    before, after = object(), object()
    numbers = [_added(registries.of(s, before), e) for s, e in ((sets[0], first), (sets[1], second), (sets[0], third))]
    assert numbers == [0, 0, 1]
    assert [*registries.of(sets[0], before).others(first)] == [second, third]
    registries.of(sets[0], after).add(first, 0)
    assert _added(registries.of(sets[0], after), _Method()) == 1, "new ranks begin to count at 0"
    assert {*registries.of(sets[0], after).others(first)} == {second, third}


@pytest.mark.parametrize("verb", ["allreduce", "allgather", "alltoall", "broadcast"])
def test_a_tensor_that_horovod_drops_is_not_the_last_reference(verb):
    """When a rank fails, Horovod's thread drops tensors while it holds a lock: freeing one there would need the
    interpreter, whose owner waits for the lock."""
    given = []

    def start(*arguments, **options):
        given.extend(weakref.ref(each) for each in arguments if isinstance(each, torch.Tensor))
        return 1

    carrier = object.__new__(HorovodCollectives)
    carrier._set = SimpleNamespace(ranks=[0, 1], included=lambda: True, size=lambda: 2)
    carrier._hvd = SimpleNamespace(Sum=None, broadcast_async_=start)
    carrier._mpi_ops = SimpleNamespace(_allreduce_async=start, _allgather_async=start, _alltoall_async=start)
    handle = carrier.start(Request(verb, torch.ones(4), "values"), "name")
    assert len(given) == {"broadcast": 1, "alltoall": 4}.get(verb, 2)
    assert all(each() is not None for each in given), "Horovod's reference is the last one"
    del handle
    assert all(each() is None for each in given)
