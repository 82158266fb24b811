"""The set of ranks changes, as in Horovod's elastic mode."""

from functools import partial

import pytest
import torch
from harness import Rank, random_steps, replicas, together, without_loss
from methods import METHODS
from models import equal, gradients

from hvd_compress import IWP
from hvd_compress.carriers.threads import ThreadWorld


@pytest.mark.parametrize("name", ["iwp", "iwp-lanes4", "iwp-lloyd4", "fft", "mipd", "mipd-lloyd4"])
def test_a_new_rank_agrees_with_one_that_has_trained_before(name):
    """The old rank has updated its shares of the slots and counted many steps, the new one has not."""
    method = partial(METHODS[name], density=1 / 16, budget_interval=3, bucket_mb=0.08)
    world, ranks = replicas(2, method)
    random_steps(world, ranks, range(10))
    survivor = ranks[0]
    assert any((shares := work.parts["shares"]).weights != shares.sizes for work in survivor.compression.works)
    # It was in the middle of a step when the other rank failed.
    p = survivor.model.wide.weight
    p.grad = torch.ones_like(p)
    survivor.compression.compress(p.grad)
    formed = ThreadWorld(2)
    survivor.move_to(formed, 0)
    fresh = Rank(formed, 1, survivor.model, method)
    applied = random_steps(formed, [survivor, fresh], range(20, 25))
    assert equal(*applied)
    assert [r.compression.stats()["steps"] for r in (survivor, fresh)] == [5, 5]


@pytest.mark.alternate("momentum")
@pytest.mark.parametrize("name", ["iwp", "iwp-fp32", "iwp-lloyd4", "iwp-range10-gather", "fft", "mipd", "mp2-silent"])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (3, 1)])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_no_residual_is_lost_if_the_number_of_ranks_changes(name, before, after, momentum):
    """The last of the old ranks becomes the first of the new ones."""
    method = partial(METHODS[name], density=1 / 16, bucket_mb=0.08, momentum=momentum)
    world, ranks = replicas(before, method)
    random_steps(world, ranks, range(5))
    survivor = ranks[-1]
    formed = ThreadWorld(after)
    survivor.move_to(formed, 0)
    everyone = [survivor, *(Rank(formed, i, survivor.model, method) for i in range(1, after))]
    for step in range(20, 24):
        take_step = together if momentum else without_loss
        applied = take_step(formed, everyone, [gradients(r.model, seed=1000 * step + r.rank) for r in everyone])
        assert all(equal(applied[0], other) for other in applied[1:])


@pytest.mark.parametrize("means", [True, False])
def test_gradients_of_an_interrupted_step_are_not_counted_twice(means):
    """The other ranks fail in the middle of a step, and the loop continues without zero_grad()."""
    _, (rank,) = replicas(1, IWP, density=1 / 16, block_means=means)
    unchanged, added, new = rank.model.wide.weight, rank.model.deep.weight, rank.model.conv.weight
    for p in (unchanged, added):
        p.grad = torch.ones_like(p)
        rank.compression.compress(p.grad)
    rank.move_to(ThreadWorld(1), 0)
    added.grad += 1.0
    new.grad = torch.ones_like(new)
    rank.compression.compress(new.grad)
    assert not unchanged.grad.any(), "the residual contains it"
    assert added.grad.all(), "a new gradient was added"
    torch.testing.assert_close(rank.compression.residual("wide.weight"), torch.ones_like(unchanged))


def test_a_new_rank_agrees_with_one_whose_optimizer_has_got_a_new_parameter_group():
    world, ranks = replicas(2, IWP)
    optimizer = torch.optim.SGD(ranks[0].model.parameters(), lr=0.0)
    random_steps(world, ranks, [0])
    optimizer.step()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    optimizer.step()
    formed = ThreadWorld(2)
    ranks[0].move_to(formed, 0)
    random_steps(formed, [ranks[0], Rank(formed, 1, ranks[0].model, IWP)], [1])
