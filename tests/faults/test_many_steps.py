"""Thousands of steps in which every rank's hooks fire in another order, parameters are unused and ranks pause at
random: no rank waits for ever, replicas are equal, no gradient is lost."""

import random
import time
from functools import partial

import pytest
from harness import on_hosts_in_turn, replicas, together, without_loss
from methods import FORGETFUL, METHODS
from models import equal, gradients


def late(exchange, chance, grads, shuffle):
    """Sometimes a rank pauses before its step."""
    if chance.random() < 0.02:
        time.sleep(chance.random() * 3e-3)
    return exchange(grads, shuffle)


def abuse(name, steps, host="horovod"):
    world, ranks = replicas(3, METHODS[name], host=host, bucket_mb=0.05)
    chances = [random.Random(rank.rank) for rank in ranks]
    for rank, chance in zip(ranks, chances, strict=True):
        rank.exchange = partial(late, rank.exchange, chance)
    take_step = together if name.partition("-")[0] in FORGETFUL else without_loss
    for step in range(steps):
        everyone = [gradients(rank.model, seed=3 * step + rank.rank) for rank in ranks]
        everyone = [
            [None if c.random() < 0.1 else g for g in grads] for c, grads in zip(chances, everyone, strict=True)
        ]
        applied = take_step(world, ranks, everyone, shuffle=step)
        assert all(equal(applied[0], other) for other in applied[1:]), f"step {step}"


@on_hosts_in_turn
@pytest.mark.parametrize("name", ["iwp", "fft", "mipd", "topk"])
def test_hundreds_of_shuffled_steps(name, host):
    abuse(name, 150, host=host)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["iwp", "fft", "mipd", "slimdp", "mp2", "topk", "dgc", "qsgd", "terngrad", "powersgd"])
def test_thousands_of_shuffled_steps(name):
    """Ten thousand in all."""
    abuse(name, 1000)
