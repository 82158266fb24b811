"""Ranks whose weights drift apart although their averages are equal: a warning, whatever passes the gradients in."""

import copy
import warnings
from functools import partial

import pytest
import torch
from fake_ddp import FakeBucket
from harness import KINDS, replicas, together
from methods import METHODS
from models import gradients
from torch import nn

from hvd_compress import NoCompression
from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.guards.same_weights import _INTERVAL, SameWeights

HOSTS = pytest.mark.parametrize("host", KINDS)


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 40), nn.Linear(40, 8))


def trained(host, steps, method="none", size=2, optimizer=lambda rank, model: torch.optim.SGD(model.parameters(), 0.1)):
    """The warnings of drift in a training, and its ranks. Each rank has an ``optimizer``, and ``before(step, rank)`` is
    called before it steps."""
    world, ranks = replicas(size, METHODS[method], layers(), host)
    for rank in ranks:
        rank.optimizer = optimizer(rank.rank, rank.model)
        rank.applied = lambda rank=rank: [p.grad for p in rank.model.parameters()]

    def run(before=lambda step, rank: None):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(steps):
                together(world, ranks, [gradients(rank.model, seed=100 * step + rank.rank) for rank in ranks], step)
                for rank in ranks:
                    before(step, rank)
                    rank.optimizer.step()
                    rank.optimizer.zero_grad()
        return [str(w.message) for w in caught if "the ranks' weights differ" in str(w.message)]

    return ranks, run


def own_rate(step, rank):
    rank.optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank.rank)


def own_norm(step, rank):
    nn.utils.clip_grad_norm_(rank.model.parameters(), 0.1 * (1 + rank.rank))


def own_skip(step, rank):
    if rank.rank == 1 and step == 3:
        rank.optimizer.zero_grad()


def own_weights(step, rank):
    with torch.no_grad():
        rank.model[1].weight *= 1 + 0.01 * rank.rank * (step == 2)


def not_a_number(step, rank):
    if rank.rank == 1:
        rank.model[0].bias.data.fill_(float("nan"))


@pytest.mark.alternate("size")
@HOSTS
@pytest.mark.parametrize("size", [2, (2, 2)], ids=["2", "2x2"])
@pytest.mark.parametrize("before", [own_rate, own_norm, own_skip, own_weights, not_a_number])
def test_what_a_loop_does_otherwise_on_one_rank(before, host, size):
    ranks, run = trained(host, 11, size=size)
    assert len(run(before)) == len(ranks)


def own_moments(rank, model):
    """As after local steps, in which each rank has moments of its own."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(3):
        for p, grad in zip(model.parameters(), gradients(model, seed=step + rank), strict=True):
            p.grad = grad
        optimizer.step()
    model.load_state_dict(copy.deepcopy(layers().state_dict()))
    return optimizer


@HOSTS
@pytest.mark.parametrize("method", ["iwp", "quantized", "demo", "powersgd"])
def test_optimizers_with_states_of_their_own(host, method):
    _, run = trained(host, 2, method, optimizer=own_moments)
    assert len(run()) == 2


@HOSTS
def test_equal_ranks_and_the_bytes(host):
    """At most 256 bytes a rank, in four of the first 101 steps."""
    ranks, run = trained(host, _INTERVAL + 1)
    assert not run()
    stats = ranks[0].compression.stats()
    assert 4 * 4 * 16 <= stats["total"]["budget_bytes"] <= 4 * 256


@HOSTS
def test_drift_that_begins_late(host):
    def late(step, rank):
        if step > 50:
            own_rate(step, rank)

    _, run = trained(host, _INTERVAL + 1)
    assert len(run(late)) == 2


@pytest.mark.parametrize("method", ["none", "iwp"])
def test_weights_of_parameters_that_are_not_averaged_may_differ(method):
    """Such as a rank's own experts, which DDP ignores."""
    ranks, run = trained("ddp", 11, method)
    for rank in ranks:
        rank.buckets = partial(bucket_of_the_first, rank.model[0].weight)
        with torch.no_grad():
            rank.model[1].weight += rank.rank
    assert not run()
    assert not torch.equal(ranks[0].model[1].weight, ranks[1].model[1].weight)


def bucket_of_the_first(parameter, grads, shuffle):
    return [FakeBucket(0, [parameter], grads[0].flatten(), True)]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("repeats", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_step_that_has_failed_is_repeated_with_its_allgather(ordered, repeats, apart):
    """Another one would meet the first, which the other rank may not have started so far."""
    world, models = ThreadWorld(2, ordered=ordered), [layers(), layers()]
    models[1][0].weight.data += float(apart)
    built = [NoCompression(model, collectives=world.collectives(rank)) for rank, model in enumerate(models)]

    def train(rank):
        weights = SameWeights(built[rank].engine)
        for _ in range(1 + repeats.count(rank)):
            weights.begin()
            built[rank].reset()
        weights.compare([True] * 4)
        built[rank].engine.step = 1
        weights.begin()
        weights.compare([True] * 4)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        world.run(train)
    assert len(caught) == 2 * apart
