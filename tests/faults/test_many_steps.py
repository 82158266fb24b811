"""Thousands of steps in which every rank's hooks fire in another order, parameters are unused and ranks pause at
random: no rank waits for ever, replicas are equal, no gradient is lost."""

import random
import time

import pytest
import torch
from harness import gradients, on_hosts_in_turn, replicas, residuals
from methods import FORGETFUL, METHODS


def abuse(name, steps, size=3, host="horovod"):
    world, ranks = replicas(size, METHODS[name], host=host, bucket_mb=0.05)
    total = {n: torch.zeros(p.shape, dtype=torch.float64) for n, p in ranks[0].model.named_parameters()}
    names = list(total)

    def step(rank, number, grads):
        chance = random.Random(1000 * number + rank)
        if chance.random() < 0.02:
            time.sleep(chance.random() * 3e-3)
        return ranks[rank].exchange(grads, shuffle=number)

    for number in range(steps):
        everyone = []
        for rank in ranks:
            chance = random.Random(77 * number + rank.rank)
            grads = gradients(rank.model, seed=size * number + rank.rank)
            everyone.append([None if chance.random() < 0.1 else g for g in grads])
        for grads in everyone:
            for n, g in zip(names, grads, strict=True):
                total[n] += 0.0 if g is None else g.double()
        applied = world.run(lambda r, number=number, everyone=everyone: step(r, number, everyone[r]))
        for other in applied[1:]:
            assert all(torch.equal(a, b) for a, b in zip(applied[0], other, strict=True)), f"step {number}"
        for n, g in zip(names, applied[0], strict=True):
            total[n] -= size * g.double()
    if name.partition("-")[0] in FORGETFUL:
        return
    # PowerSGD sums float16: no rank knows the sums' rounding, so it stays in no residual.
    each = 4e-3 if name == "powersgd" else 1e-3
    held = [residuals(r) for r in ranks]
    for n, p in ranks[0].model.named_parameters():
        if p.dim() >= 2 and p.numel() >= 1024:
            torch.testing.assert_close(sum(h[n] for h in held), total[n], rtol=0, atol=each * steps**0.5)


@on_hosts_in_turn
@pytest.mark.parametrize("name", ["iwp", "fft", "mipd", "topk"])
def test_hundreds_of_shuffled_steps(name, host):
    abuse(name, 150, host=host)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["iwp", "fft", "mipd", "slimdp", "mp2", "topk", "dgc", "qsgd", "terngrad", "powersgd"])
def test_thousands_of_shuffled_steps(name):
    """Ten thousand in all."""
    abuse(name, 1000)
