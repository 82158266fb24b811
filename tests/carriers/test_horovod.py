"""Horovod's registries, without Horovod."""

from hvd_compress.carriers.horovod import _Registries


class _Engine:
    """As far as a registry sees it."""

    exchanging = True


def test_compressors_of_all_process_sets_know_each_other_and_go_on_when_the_ranks_change():
    registries, sets = _Registries(), [_Engine(), _Engine()]
    first, second, third = _Engine(), _Engine(), _Engine()
    before, after = object(), object()
    numbers = [registries.of(s, before).add(e) for s, e in ((sets[0], first), (sets[1], second), (sets[0], third))]
    assert numbers == [0, 0, 1]
    assert [*registries.of(sets[0], before).others(first)] == [second, third]
    registries.of(sets[0], after).add(first, 0)
    assert registries.of(sets[0], after).add(_Engine()) == 1, "new ranks begin to count at 0"
    assert {*registries.of(sets[0], after).others(first)} == {second, third}
