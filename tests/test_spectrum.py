"""The orthonormal real Fourier transform, and what FFT does with it."""

import math

import pytest
import torch
from harness import random_steps, replicas, together

from hvd_compress import FFT
from hvd_compress.methods import spectrum
from hvd_compress.selection.schedule import Diminishing

SIZES = [1, 2, 3, 255, 1000, 4095, 4096, 4097, 8192, 12289]


def random(n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize("n", SIZES)
def test_the_inverse_gives_back_what_went_in(n):
    flat, back = random(n), torch.empty(n)
    coefficients = torch.full((spectrum.padded(n),), float("nan"))
    spectrum.forward(flat, coefficients)
    spectrum.inverse(coefficients, back)
    torch.testing.assert_close(back, flat, rtol=0, atol=1e-5)


@pytest.mark.parametrize("n", SIZES)
def test_lengths_are_kept(n):
    """Parseval: interior bins count twice, the mean and the highest frequency once."""
    flat = random(n)
    coefficients = torch.empty(spectrum.padded(n))
    spectrum.forward(flat, coefficients)
    torch.testing.assert_close(coefficients.norm(), flat.norm(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("theta", [0.5, 0.85, 0.97])
def test_dropping_the_smallest_share_costs_at_most_that_share(theta):
    """Parseval's bound of the paper's proof: |v - vhat|^2 <= theta |v|^2."""
    flat, back = random(8192), torch.empty(8192)
    coefficients = torch.empty(8192)
    spectrum.forward(flat, coefficients)
    dropped = coefficients.abs().argsort()[: int(theta * 8192)]
    coefficients[dropped] = 0.0
    spectrum.inverse(coefficients, back)
    assert 0 < (back - flat).square().sum() <= theta * flat.square().sum()


def test_a_wave_is_one_coefficient():
    """What FFT is for: a periodic gradient arrives whole in the first step at a density that is a thousandth."""
    model = torch.nn.Linear(64, 64, bias=False)
    world, ranks = replicas(2, FFT, model=model, density=16 / 4096, values="fp32")
    wave = torch.cos(torch.arange(4096) * (2 * math.pi * 37 / 4096)).view(64, 64)
    applied = together(world, ranks, [[wave.clone()], [3 * wave]])
    torch.testing.assert_close(applied[0][0], 2 * wave, rtol=0, atol=1e-4)


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
        assert 0.7 < kept / (1 - (1 - 1 / 64) * rate / 0.3) <= 1.0, "a step of sqrt(2) at most under the formula"


def test_the_density_follows_a_function():
    """Horovod's optimizer has other groups than the one it wraps once it has loaded a state."""
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    wrapper = torch.optim.SGD(plain.param_groups, lr=0.1)
    density = Diminishing(1 / 64, lambda: wrapper.param_groups[0]["lr"])
    wrapper.load_state_dict(wrapper.state_dict())
    assert density(0) == 1 / 64
    wrapper.param_groups[0]["lr"] = 0.0
    assert density(1) == 1.0 and plain.param_groups[0]["lr"] == 0.1


def test_the_ratio_diminishes_in_training():
    """Shapes change with the density, and nothing else."""
    model = torch.nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world, ranks = replicas(2, FFT, model=model, density=Diminishing(1 / 64, optimizer))
    ratios = []
    for step, rate in enumerate((0.1, 0.05, 0.0)):
        optimizer.param_groups[0]["lr"] = rate
        random_steps(world, ranks, [step])
        ratios.append(ranks[0].compression.stats()["last"]["wire_ratio"])
    assert ratios[0] > 50 and ratios == sorted(ratios, reverse=True) and ratios[2] < 8


def test_a_spectrum_is_not_loaded_into_another_memory_order():
    model = torch.nn.Conv2d(8, 33, 3)
    _, (one,) = replicas(1, FFT, model=model.to(memory_format=torch.channels_last))
    state = one.compression.state_dict()
    _, (other,) = replicas(1, FFT, model=model.to(memory_format=torch.contiguous_format))
    with pytest.raises(ValueError, match="use the same memory_format"):
        other.compression.load_state_dict(state)


def test_gathering_needs_codes_that_are_gathered():
    with pytest.raises(ValueError, match="values have to be gathered"):
        replicas(1, FFT, exchange="gather", values="fp16")
    with pytest.raises(ValueError, match="exchange must be one of gather, ring"):
        replicas(1, FFT, exchange="star")
