"""The model of most tests, gradients for it, and the comparison of tensors."""

from collections.abc import Iterable

import torch
from torch import Tensor


def mixed_model(seed: int = 0) -> torch.nn.Module:
    """A small convolution (not compressed), padding, a channels_last convolution, biases, a norm."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed() formats and keeps a stack, for GPUs
    model = torch.nn.Sequential()
    model.first = torch.nn.Conv2d(3, 8, 3)
    model.norm = torch.nn.BatchNorm2d(8)
    model.conv = torch.nn.Conv2d(8, 33, 3).to(memory_format=torch.channels_last)
    model.wide = torch.nn.Linear(301, 47)
    model.deep = torch.nn.Linear(64, 64, bias=False)
    return model


def compressed(parameter: Tensor) -> bool:
    """Whether a parameter is compressed under the default ``min_numel``."""
    return parameter.dim() >= 2 and parameter.numel() >= 1024


def gradients(model: torch.nn.Module, seed: int, scale: float = 1.0) -> list[Tensor]:
    """One random gradient per parameter, in the parameter's memory order and dtype."""
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(p.shape, generator=generator, dtype=torch.float32) * scale for p in model.parameters())
    return [torch.empty_like(p).copy_(value) for p, value in zip(model.parameters(), values, strict=True)]


def equal(one: Iterable[Tensor], other: Iterable[Tensor]) -> bool:
    """Whether two lists of tensors are bit-equal."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
