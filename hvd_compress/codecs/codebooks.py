"""Codebooks (Lloyd 1982, Max 1960): optimal levels for Gaussian and Laplacian values of unit variance. Since the last
bits of ``erf`` and ``exp`` differ between machines, levels are rounded to multiples of 2**-14."""

import math
from functools import lru_cache

import torch
from torch import Tensor

from ..engine.modes import modes_off

#: The distributions, in the order of a codebook's rows.
DISTRIBUTIONS = ("gauss", "laplace")
_FINE = 2.0**14


def mass_and_moment(edges: Tensor, distribution: str) -> tuple[Tensor, Tensor]:
    """The integrals of the density, and of the value times the density, from each edge >= 0 on."""
    if distribution == "gauss":
        return torch.erfc(edges * math.sqrt(0.5)) / 2, torch.exp(edges * edges * -0.5) / math.sqrt(2 * math.pi)
    mass = torch.exp(edges * -math.sqrt(2)) / 2
    return mass, (edges + math.sqrt(0.5)) * mass


@lru_cache
@modes_off
def codebook_on(bits: int, device: torch.device) -> Tensor:
    return codebook(bits).to(device)


@lru_cache
@modes_off
def codebook(bits: int) -> Tensor:
    """The ``2**bits`` levels with the least mean squared error, for each of :data:`DISTRIBUTIONS`: float32,
    (2, 2**bits), ascending, symmetric."""
    rows = []
    for distribution in DISTRIBUTIONS:
        half = 2 ** (bits - 1)
        # Initial levels: their density is the cube root of the probability density, as in a compander.
        rank = (torch.arange(half, dtype=torch.float64, device="cpu") + 0.5) / half
        wide = math.sqrt(3) if distribution == "gauss" else 3
        levels = (
            torch.erfinv(rank) * math.sqrt(2) * wide if distribution == "gauss" else -torch.log1p(-rank) * wide / 2**0.5
        )
        zero = levels.new_zeros(1)
        for _ in range(4000):
            mass, moment = mass_and_moment(torch.cat([zero, (levels[1:] + levels[:-1]) / 2]), distribution)
            better = moment.diff(append=zero) / mass.diff(append=zero)
            if bool((better - levels).abs().max() < 1e-9):
                break
            levels = better
        levels = ((levels * _FINE).round() / _FINE).float()
        rows.append(torch.cat([-levels.flip(0), levels]))
    return torch.stack(rows)
