"""A network that computes nothing: its backward hands out prepared gradients, from the last parameter to the first."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from experiment.shapes import Named

#: Every step reads the noise from another place, so that gradients change without any being made.
SLACK = 1 << 20


class _HandOut(torch.autograd.Function):
    """Passes ``x`` on; backward gives the parameter its prepared gradient and then goes on to the layer before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, Tensor, None]:
        return given[0], ctx.gradient, None


class Synthetic(nn.Module):
    """Parameters of given shapes, and for each rank and step gradients of its own: normal, of deviation 0.01.

    All gradients are windows into one stretch of noise. autograd copies them into ``p.grad``, since they are held here
    too: what follows may write there.
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
        """A scalar without meaning, to call ``backward()`` on; a new step's gradients are prepared."""
        self.step += 1
        self.prepared = [
            self.noise[offset : offset + p.numel()].view(p.shape)
            for number, p in enumerate(self.parameters())
            # A multiplicative hash: neighbours in step and number lie far apart.
            for offset in [(self.step * 10007 + number) * 2654435761 % SLACK]
        ]
        x = torch.zeros(())
        for parameter, gradient in zip(self.parameters(), self.prepared, strict=True):
            x = _HandOut.apply(x, parameter, gradient)  # type: ignore[no-untyped-call]
        return x
