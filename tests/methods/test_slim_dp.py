"""Slim-DP: core and explorer."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from harness import random_steps, replicas

from hvd_compress import SlimDP
from hvd_compress.reference import BLOCK, flat_positions


def sent(rank, number=0):
    """The positions of the entries that the last step sent of a bucket."""
    picker = rank.compression.works[number].decider.picker
    return set(flat_positions(picker.indices, picker.table, picker.phase).tolist())


def steps(core, count, density=8 / 256, **options):
    """The entries of each step, and a rank."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False)
    world, ranks = replicas(2, partial(SlimDP, density=density, core=core, **options), model=model)
    seen = []
    for step in range(count):
        random_steps(world, ranks, [step])
        assert sent(ranks[0]) == sent(ranks[1]), "all ranks select the same entries"
        seen.append(sent(ranks[0]))
    return seen, ranks[0]


def test_the_core_is_constant_and_the_explorer_changes():
    seen, rank = steps(core=0.5, count=10)
    assert all(len(one) == 8 * 16 for one in seen)
    core = set.intersection(*seen)
    # In step 0 only the weights count: the four largest of every block.
    largest = rank.model.weight.detach().view(16, BLOCK).abs().topk(4).indices + torch.arange(16)[:, None] * BLOCK
    assert core == set(largest.flatten().tolist())
    explored = [one - core for one in seen]
    assert all(len(a & b) < 12 for a, b in pairwise(explored)), "64 of 4032 meet by chance"


def test_only_a_core_and_only_an_explorer():
    seen, _ = steps(core=1.0, count=40)
    assert all(one == seen[0] for one in seen[:20]) and all(one == seen[20] for one in seen[20:])
    seen, _ = steps(core=0.0, count=200)
    assert len(set.union(*seen)) > 4080, "almost every entry has been drawn"


@pytest.mark.parametrize("density", [1 / 500, 5.5 / 256])
def test_a_core_alone_is_constant_at_any_density(density):
    seen, _ = steps(core=1.0, count=5, density=density)
    assert all(one == seen[0] for one in seen)


def test_the_core_follows_the_gradients():
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False)
    build = partial(SlimDP, density=64 / 256, core=0.5, smoothing=0.0, values="fp32")
    world, ranks = replicas(2, build, model=model)
    hot = torch.zeros(64, 64)
    hot.view(16, BLOCK)[:, ::8] = 1.0
    for _ in range(100):
        world.run(lambda i: ranks[i].exchange([hot * (1.0 + i)]))
    core = (ranks[0].compression.works[0].parts["core"].chance > 1.0).view(16, BLOCK).nonzero()
    assert set((core[:, 1] % 8).tolist()) == {0}
    assert len(core) == 16 * 32


def test_no_indices_are_sent():
    world, ranks = replicas(3, partial(SlimDP, density=1 / 32))
    random_steps(world, ranks, range(3))
    last = ranks[0].compression.stats()["last"]
    assert last["indices_bytes"] == 0.0 and last["values_bytes"] > 0.0


def test_the_explorer_is_drawn_after_the_density_falls_from_one():
    world, ranks = replicas(2, partial(SlimDP, density=lambda step: 1.0 if step < 3 else 1 / 32))
    random_steps(world, ranks, range(4))
    indices = ranks[0].compression.works[0].decider.picker.indices
    assert int(indices.max()) > 100, "drawn at random, not the first of every block"
