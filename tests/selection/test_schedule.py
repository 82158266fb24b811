"""Density schedules."""

import pytest
import torch
from harness import Scheduled, gradients, random_steps, replicas, together

from hvd_compress import FFT, IWP
from hvd_compress.selection.schedule import Diminishing, WarmUp


def test_warm_up_divides_the_density_by_four_in_each_stage():
    schedule = WarmUp(1 / 64, 30)
    assert [schedule(step) for step in (0, 14, 15, 29, 30, 10**6)] == [1 / 4, 1 / 4, 1 / 16, 1 / 16, 1 / 64, 1 / 64]
    assert WarmUp(1 / 64)(0) == 1 / 64
    assert WarmUp(1 / 2, 10)(0) == 1 / 2
    assert [WarmUp(1 / 100, 9)(step) for step in (0, 3, 8, 9)] == [1 / 4, 1 / 16, 1 / 64, 1 / 100]


def test_the_density_follows_the_learning_rate():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    density = Diminishing(1 / 64, optimizer)
    seen = []
    for rate in (0.1, 0.3, 0.2, 0.1, 0.03, 0.0):
        optimizer.param_groups[0]["lr"] = rate
        seen.append(density(0))
    assert seen[:2] == [1 / 64, 1 / 64], "the highest rate so far has the lowest density"
    assert seen == sorted(seen) and seen[-1] == 1.0
    for rate, kept in zip((0.2, 0.1, 0.03), seen[2:], strict=False):
        assert 0.7 < kept / (1 - (1 - 1 / 64) * rate / 0.3) <= 1.0, "at most a factor of sqrt(2) under the formula"


def test_the_learning_rate_can_be_a_function():
    """Horovod's optimizer has its own parameter groups after loading a state."""
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    wrapper = torch.optim.SGD(plain.param_groups, lr=0.1)
    density = Diminishing(1 / 64, lambda: wrapper.param_groups[0]["lr"])
    wrapper.load_state_dict(wrapper.state_dict())
    assert density(0) == 1 / 64
    wrapper.param_groups[0]["lr"] = 0.0
    assert density(1) == 1.0 and plain.param_groups[0]["lr"] == 0.1


def test_the_wire_ratio_falls_with_the_learning_rate():
    model = torch.nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world, ranks = replicas(2, FFT, model=model, density=Diminishing(1 / 64, optimizer))
    ratios = []
    for step, rate in enumerate((0.1, 0.05, 0.0)):
        optimizer.param_groups[0]["lr"] = rate
        random_steps(world, ranks, [step])
        ratios.append(ranks[0].compression.stats()["last"]["wire_ratio"])
    assert ratios[0] > 50 and ratios == sorted(ratios, reverse=True) and ratios[2] < 8


@pytest.mark.parametrize("density", [0.0, 1.5, float("nan")])
def test_a_schedule_that_returns_an_invalid_density_raises_an_error(density):
    world, ranks = replicas(1, IWP, density=Scheduled(lambda step: density))
    with pytest.raises(ValueError, match=r"density must lie in \(0, 1\]"):
        together(world, ranks, [gradients(ranks[0].model, 0)])
