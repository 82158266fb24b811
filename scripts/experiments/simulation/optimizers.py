"""The optimizers of the simulated ranks. Each maps gradients (runs, ranks, entries) to updates of the same shape, which
are still to be multiplied by the learning rate."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from simulation.setting import Task
from simulation.weights import RUN, Layout

MOMENTUM = 0.95


class Optimizer(Protocol):
    def update(self, gradient: Tensor) -> Tensor: ...


class Sign:
    """The sign of the Nesterov momentum, as scripts/experiments/train.py has it beside Muon."""

    def __init__(self, like: Tensor) -> None:
        self._velocity = torch.zeros_like(like)

    def update(self, gradient: Tensor, steps: int = 1) -> Tensor:
        """``steps``: that one step stands for, all by this gradient g. With b = momentum ** steps and
        c = (1 - b) / (1 - momentum), v = b v + c g, as after that many steps, and the update is sign(c g + b v)."""
        momentum = MOMENTUM**steps
        gradient = gradient * ((1 - momentum) / (1 - MOMENTUM)) if steps > 1 else gradient
        return nesterov(self._velocity, gradient, momentum).sign_()

    def predicted(self) -> Tensor:
        """The gradient that keeps the momentum as it is: (1 - momentum) v."""
        return self._velocity * (1 - MOMENTUM)

    def load(self, common: "Sign") -> None:
        """Takes the state, (runs, entries), on each rank."""
        self._velocity.copy_(common._velocity[:, None])


class Muon:
    """Of the hidden matrices of a layout, with root mean square ``size``; bfloat16 inside, as is usual."""

    def __init__(self, like: Tensor, layout: Layout, size: float) -> None:
        self._velocity, self._stacks, self._size = torch.zeros_like(like), layout.stacks, size

    def update(self, gradient: Tensor) -> Tensor:
        momentum = nesterov(self._velocity, gradient)
        lengths = [count * (-(-shape.numel() // RUN) * RUN) for shape, count in self._stacks]
        parts = zip(momentum.split(lengths, -1), self._stacks, strict=True)
        return torch.cat([self._stack(part, shape, count) for part, (shape, count) in parts], -1)

    def _stack(self, part: Tensor, shape: torch.Size, count: int) -> Tensor:
        """Of ``count`` matrices of one shape, each padded: (runs, ranks, entries)."""
        views = part.unflatten(-1, (count, -1))
        padding = views.shape[-1] - shape.numel()
        matrices = views[..., : shape.numel()].reshape(-1, *shape)
        tall = shape[0] > shape[1]
        moved = orthogonal(matrices.mT if tall else matrices).float() * (self._size * max(shape) ** 0.5)
        moved = (moved.mT if tall else moved).reshape(*views.shape[:-1], shape.numel())
        return (F.pad(moved, (0, padding)) if padding else moved).flatten(-2)


class AdamW:
    """Without the decay of weights."""

    def __init__(self, like: Tensor, betas: tuple[float, float]) -> None:
        self._mean, self._square, self._betas, self._steps = torch.zeros_like(like), torch.zeros_like(like), betas, 0

    def update(self, gradient: Tensor, steps: int = 1) -> Tensor:
        """``steps``: that one step stands for, all by this gradient: both betas are raised to this power, and the
        corrections of the moments are those after so many steps more."""
        self._steps += steps
        first, second = (1 - beta**self._steps for beta in self._betas)
        beta1, beta2 = (beta**steps for beta in self._betas)
        self._mean.lerp_(gradient, 1 - beta1)
        self._square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        return self._mean / self._square.sqrt().div_(second**0.5).add_(1e-8).mul_(first)

    def predicted(self) -> Tensor:
        """The first moment, corrected; 0 before the first step."""
        return self._mean / (1 - self._betas[0] ** self._steps) if self._steps else self._mean.clone()

    def load(self, common: "AdamW") -> None:
        """Takes the state, (runs, entries), on each rank."""
        self._mean.copy_(common._mean[:, None])
        self._square.copy_(common._square[:, None])
        self._steps = common._steps


class Parts:
    """One optimizer for the entries before ``start``, one for those after it."""

    def __init__(self, start: int, before: Optimizer, after: Optimizer) -> None:
        self._start, self._before, self._after = start, before, after

    def update(self, gradient: Tensor) -> Tensor:
        before, after = gradient.split([self._start, gradient.shape[-1] - self._start], -1)
        return torch.cat([self._before.update(before), self._after.update(after)], -1)


def build(kind: str, task: Task, layout: Layout, like: Tensor, before: Optimizer | None = None) -> Optimizer:
    """``kind``: of a :class:`Setting`; ``like``: the weights; ``before``: of all but the hidden matrices, if not the
    task's. ``ValueError`` for another kind."""
    if kind == "adamw":
        return AdamW(like, task.betas)
    if kind != "muon":
        raise ValueError(f"optimizer must be 'muon' or 'adamw', got {kind!r}")
    before = before or others(task, like[..., : layout.matrices])
    return Parts(layout.matrices, before, Muon(like[..., layout.matrices :].contiguous(), layout, task.muon))


def others(task: Task, like: Tensor) -> Sign | AdamW:
    """Of all but the hidden matrices."""
    like = like.contiguous()
    return Sign(like) if task.others == "sign" else AdamW(like, task.betas)


def nesterov(velocity: Tensor, gradient: Tensor, momentum: float = MOMENTUM) -> Tensor:
    velocity.mul_(momentum).add_(gradient)
    return gradient.add(velocity, alpha=momentum)


def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest matrices with orthonormal rows, by Newton and Schulz: bfloat16 (n, rows, columns)."""
    x = (matrices / matrices.flatten(1).norm(dim=1).clamp(min=1e-30)[:, None, None]).bfloat16()
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x
