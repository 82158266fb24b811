"""Density schedules."""

import pytest
import torch
from harness import random_steps, replicas, together
from models import gradients

from hvd_compress import FFT, IWP
from hvd_compress.schedule import diminishing, warm_up


def test_warm_up_divides_the_density_by_four_in_each_stage():
    schedule = warm_up(1 / 64, 30)
    assert [schedule(step) for step in (0, 14, 15, 29, 30, 10**6)] == [1 / 4, 1 / 4, 1 / 16, 1 / 16, 1 / 64, 1 / 64]
    assert warm_up(1 / 64, 0)(0) == 1 / 64
    assert warm_up(1 / 2, 10)(0) == 1 / 2
    assert [warm_up(1 / 100, 9)(step) for step in (0, 3, 8, 9)] == [1 / 4, 1 / 16, 1 / 64, 1 / 100]


def test_the_density_rises_as_the_learning_rate_falls():
    for rate in (0.3, 0.4):
        assert diminishing(1 / 64, lambda rate=rate: rate, 0.3)(0) == 1 / 64, "a higher rate counts as the highest"
    for rate in (0.2, 0.1, 0.03):
        kept = diminishing(1 / 64, lambda rate=rate: rate, 0.3)(0)
        assert 0.7 < kept / (1 - (1 - 1 / 64) * rate / 0.3) <= 1.0, "at most a factor of sqrt(2) under the formula"
    assert diminishing(1 / 64, lambda: 0.0, 0.3)(0) == 1.0


def test_the_wire_ratio_falls_with_the_learning_rate():
    model = torch.nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    density = diminishing(1 / 64, lambda: optimizer.param_groups[0]["lr"], 0.1)
    world, ranks = replicas(2, FFT, model=model, density=density)
    ratios = []
    for step, rate in enumerate((0.1, 0.05, 0.0)):
        optimizer.param_groups[0]["lr"] = rate
        random_steps(world, ranks, [step])
        ratios.append(ranks[0].compression.stats()["last"]["wire_ratio"])
    assert ratios[0] > 50 and ratios == sorted(ratios, reverse=True) and ratios[2] < 8


@pytest.mark.parametrize("density", [0.0, 1.5, float("nan")])
def test_a_schedule_that_returns_an_invalid_density_raises_an_error(density):
    world, ranks = replicas(1, IWP, density=lambda step: density)
    with pytest.raises(ValueError, match="density must be a finite number, above 0 and at most 1"):
        together(world, ranks, [gradients(ranks[0].model, 0)])
