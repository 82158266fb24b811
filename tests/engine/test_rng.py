"""Random numbers that all ranks share."""

import torch

from hvd_compress.engine.rng import derive, permutation


def test_keys_and_permutations_depend_on_their_counters_only():
    assert derive(1, 2, 3) == derive(1, 2, 3) < 2**31
    assert len({derive(0, step, bucket) for step in range(100) for bucket in range(10)}) == 1000
    assert sorted(permutation(7, 9)) == list(range(9))
    # Over many steps every rank has every position about equally often.
    places = torch.zeros(4, 4)
    for step in range(4000):
        for place, rank in enumerate(permutation(derive(0, step, 0), 4)):
            places[place, rank] += 1
    assert (places / 1000 - 1).abs().max() < 0.15
