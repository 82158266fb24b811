"""FFT and the orthonormal real Fourier transform."""

import math

import pytest
import torch
from harness import replicas, together

from hvd_compress import FFT
from hvd_compress.methods import spectrum

SIZES = [1, 2, 3, 255, 1000, 4095, 4096, 4097, 8192, 12289]


def random(n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize("n", SIZES)
def test_inverse_and_forward_cancel(n):
    flat, back = random(n), torch.empty(n)
    coefficients = torch.full((spectrum.padded(n),), float("nan"))
    spectrum.forward(flat, coefficients)
    spectrum.inverse(coefficients, back)
    torch.testing.assert_close(back, flat, rtol=0, atol=1e-5)


@pytest.mark.parametrize("n", SIZES)
def test_the_transform_preserves_the_norm(n):
    """Parseval: interior frequencies count twice, the mean and the highest frequency once."""
    flat = random(n)
    coefficients = torch.empty(spectrum.padded(n))
    spectrum.forward(flat, coefficients)
    torch.testing.assert_close(coefficients.norm(), flat.norm(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("theta", [0.5, 0.85, 0.97])
def test_dropping_a_share_of_the_coefficients_has_at_most_that_relative_error(theta):
    """Parseval's bound of the paper's proof: |v - vhat|^2 <= theta |v|^2."""
    flat, back = random(8192), torch.empty(8192)
    coefficients = torch.empty(8192)
    spectrum.forward(flat, coefficients)
    dropped = coefficients.abs().argsort()[: int(theta * 8192)]
    coefficients[dropped] = 0.0
    spectrum.inverse(coefficients, back)
    assert 0 < (back - flat).square().sum() <= theta * flat.square().sum()


def test_a_wave_is_one_coefficient():
    """A periodic gradient is sent exactly in the first step, at a density of 1/256."""
    model = torch.nn.Linear(64, 64, bias=False)
    world, ranks = replicas(2, FFT, model=model, density=16 / 4096, values="fp32")
    wave = torch.cos(torch.arange(4096) * (2 * math.pi * 37 / 4096)).view(64, 64)
    applied = together(world, ranks, [[wave.clone()], [3 * wave]])
    torch.testing.assert_close(applied[0][0], 2 * wave, rtol=0, atol=1e-4)
