"""A network without computation: its backward returns prepared gradients, from the last parameter to the first."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .shapes import Named

#: Every step reads the noise from another offset: gradients change without being computed.
SLACK = 1 << 20


class _HandOut(torch.autograd.Function):
    """Returns ``x``; backward gives the parameter its prepared gradient and continues with the layer before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, Tensor, None]:
        return given[0], ctx.gradient, None


class Synthetic(nn.Module):
    """Parameters of given shapes, and for each rank and step its own gradients: normal, with standard deviation 0.01.

    All gradients are views of one noise tensor. autograd copies them into ``p.grad``, which may then be overwritten.
    """

    def __init__(self, named: Iterable[Named], rank: int, seed: int = 0) -> None:
        super().__init__()
        weights, noise = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(1000 * (seed + 1) + rank)
        for name, shape in named:
            value = torch.randn(shape, generator=weights) * 0.02
            self.register_parameter(name.replace(".", "_"), nn.Parameter(value))
        self.sizes = [parameter.numel() for parameter in self.parameters()]
        self.noise = torch.randn(max(self.sizes) + SLACK, generator=noise) * 0.01
        self.step = 0
        self.prepared: list[Tensor] = []

    @property
    def numel(self) -> int:
        return sum(self.sizes)

    def forward(self) -> Tensor:
        """A scalar to call ``backward()`` on; prepares a new step's gradients."""
        self.step += 1
        self.prepared = [
            self.noise[offset : offset + p.numel()].view(p.shape)
            for number, p in enumerate(self.parameters())
            # A multiplicative hash, so that consecutive steps and parameters have distant offsets.
            for offset in [(self.step * 10007 + number) * 2654435761 % SLACK]
        ]
        x = torch.zeros(())
        for parameter, gradient in zip(self.parameters(), self.prepared, strict=True):
            x = _HandOut.apply(x, parameter, gradient)  # type: ignore[no-untyped-call]
        return x
