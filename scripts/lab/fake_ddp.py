"""What DistributedDataParallel does with a communication hook, without it: for tests and measurements."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class FakeBucket:
    """What DDP passes to a hook: the gradients of some parameters of one dtype, views of one flat buffer."""

    number: int
    given: list[torch.nn.Parameter]
    flat: Tensor
    last: bool

    def index(self) -> int:
        return self.number

    def is_last(self) -> bool:
        return self.last

    def buffer(self) -> Tensor:
        return self.flat

    def parameters(self) -> list[torch.nn.Parameter]:
        return self.given

    def gradients(self) -> list[Tensor]:
        parts, begin = [], 0
        for p in self.given:
            parts.append(self.flat.as_strided(p.shape, p.stride(), begin))
            begin += p.numel()
        return parts


def in_backward(body: Callable[[], None]) -> None:
    """Runs ``body`` during a backward pass, as DDP calls a hook."""

    def hook(grad: Tensor) -> None:
        body()

    x = torch.zeros(1, dtype=torch.float32, device="cpu", requires_grad=True)
    with torch.enable_grad():
        y = x.clone()
        y.register_hook(hook)
        y.sum().backward()
