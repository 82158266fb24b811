"""A compressor whose gradients are no longer passed in, while its model is trained otherwise: it says nothing. With
DistributedDataParallel itself: parallel/ddp_cases.py."""

import warnings
from functools import partial

import pytest
import torch
from harness import KINDS, Rank, replicas
from models import gradients, mixed_model

from hvd_compress import DGC, IWP, DeMo, NoCompression, TopK, recipes

BUILDS = {
    "demo": DeMo,
    "demo with matrices": partial(DeMo, orthogonal=True),
    "taken": partial(IWP, density=1 / 4),
    "taken by topk": TopK,
    "dgc": DGC,
}
HOSTS = pytest.mark.parametrize("host", ["ddp", "loop"])


def warmed_up(build, host):
    """A rank after three steps of its host, and the optimizer."""
    world, (rank,) = replicas(1, build, mixed_model(), host)
    taken = build in (BUILDS["taken"], TopK)
    optimizer = torch.optim.SGD(rank.model.parameters(), lr=0.01, momentum=0.9 if taken else 0.0)
    if taken:
        rank.compression.take_momentum(optimizer)
    step(rank, optimizer, range(3))
    return world, rank, optimizer


def step(rank: Rank, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    rank.applied = lambda: rank  # by the optimizer
    for number in numbers:
        rank.exchange(gradients(rank.model, seed=number))
        optimizer.step()
        optimizer.zero_grad()


def local_step(rank: Rank, *optimizers: torch.optim.Optimizer) -> None:
    for p in rank.model.parameters():
        p.grad = torch.randn_like(p)
    for optimizer in optimizers:
        optimizer.step()


@pytest.fixture(autouse=True)
def without_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@HOSTS
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS.keys())
def test_local_steps_of_adamw_after_a_warm_up(build, host):
    world, rank, _ = warmed_up(build, host)
    adamw = torch.optim.AdamW(rank.model.parameters(), lr=1e-3)
    local = recipes.low_bit(rank.model, adamw, 2, collectives=world.collectives(0))
    for _ in range(5):
        local_step(rank, adamw)
        local.step()
    local.finish(rank.model)


@HOSTS
def test_local_steps_of_two_optimizers_and_without_local_steps(host):
    _, rank, first = warmed_up(DeMo, host)
    both = list(rank.model.parameters())
    adamw, sgd = torch.optim.AdamW(both[:3], lr=1e-3), torch.optim.SGD(both[3:], lr=0.1, momentum=0.9)
    for _ in range(3):
        local_step(rank, adamw, sgd)
    local_step(rank, first)
    step(rank, first, range(3, 6))  # averages again
    local_step(rank, adamw, sgd)


@HOSTS
def test_another_compressor_takes_over(host):
    world, rank, _ = warmed_up(DeMo, host)
    other = KINDS[host](world, 0, mixed_model(), NoCompression)
    other.model, other.compression = rank.model, NoCompression(rank.model, collectives=world.collectives(0))
    step(other, torch.optim.AdamW(rank.model.parameters(), lr=1e-3), range(3))


@HOSTS
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS.keys())
def test_gradients_that_are_passed_in_are_refused_as_before(build, host):
    _, rank, _ = warmed_up(build, host)
    adamw = torch.optim.AdamW(rank.model.parameters(), lr=1e-3)
    local_step(rank, adamw)
    with pytest.raises(ValueError, match="momentum would count twice"):
        step(rank, adamw, range(1))
