"""A network without computation: its backward returns prepared gradients, from the last parameter to the first."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .shapes import Named

#: The largest offset in the noise. Every step uses another one, so that gradients change without being computed.
SLACK = 1 << 20


def normal(shape: Sequence[int], deviation: float, generator: torch.Generator) -> Tensor:
    """Random numbers with this standard deviation: float32, on the CPU."""
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").mul_(deviation)


class _HandOut(torch.autograd.Function):
    """Returns ``x``. In backward: pauses, then gives the parameter its prepared gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor, gradient: Tensor, pause: float) -> Tensor:
        ctx.gradient, ctx.pause = gradient, pause
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, Tensor, None, None]:
        if ctx.pause:
            time.sleep(ctx.pause)
        return given[0], ctx.gradient, None, None


class Synthetic(nn.Module):
    """Parameters of given shapes, with other gradients on each rank and in each step: normal, of standard deviation
    0.01, views of one noise tensor, which autograd copies into ``p.grad``. ``pause``: seconds of a simulated
    computation that leaves the processor free, as on a GPU: a third in forward, the rest in backward, before each
    gradient in proportion to its entries."""

    def __init__(self, named: Iterable[Named], rank: int, seed: int = 0, pause: float = 0.0) -> None:
        super().__init__()
        self.pause = pause
        weights, noise = (torch.Generator("cpu").manual_seed(s) for s in (seed, 1000 * (seed + 1) + rank))
        for name, shape in named:
            self.register_parameter(name.replace(".", "_"), nn.Parameter(normal(shape, 0.02, weights)))
        self.sizes = [parameter.numel() for parameter in self.parameters()]
        self.noise = normal((max(self.sizes) + SLACK,), 0.01, noise)
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
        if self.pause:
            time.sleep(self.pause / 3)
        each = self.pause * 2 / 3 / self.numel
        x = torch.zeros((), dtype=torch.float32, device="cpu")
        for parameter, gradient in zip(self.parameters(), self.prepared, strict=True):
            x = _HandOut.apply(x, parameter, gradient, each * gradient.numel())  # type: ignore[no-untyped-call]
        return x
