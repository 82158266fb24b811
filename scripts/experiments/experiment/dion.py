"""Dion (Ahn et al., arXiv 2504.05295): low-rank orthonormal updates, of which ranks exchange the factors only."""

import argparse
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from experiment.compressors import Counted
from experiment.hosts import Host
from hvd_compress.engine.collectives import allreduce


class Dion(Optimizer):
    """Parameters of groups that are ``orthogonal`` move by a low-rank approximation of their momentum whose singular
    values are 1. On rank i, for a matrix w of r rows and c columns (further dimensions count as columns)::

        B_i = M_i + g_i
        P   = orthonormal columns of mean_i B_i Q       (r, rank)
        R   = mean_i B_i^T P                            (c, rank)
        M_i = B_i - (1 - momentum) P R^T                what was not applied stays
        Q   = R, its columns divided by their norms
        w   = w - lr (P Q^T sqrt(max(r, c)) + weight_decay w)

    The factor of the update is Muon's. Other parameters move by the sign of the Nesterov momentum of the averaged
    gradient, as with :class:`experiment.optimizers.Muon`. ``mean``: averages a float32 vector over the ranks.
    """

    mean: Callable[[Tensor], Tensor]

    def __init__(self, groups: Iterable[dict[str, Any]], rank: int, **settings: float) -> None:
        super().__init__(groups, settings)
        self._rank = rank

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            updates = (self._low_rank if group["orthogonal"] else self._signs)(group["params"], group["momentum"])
            for p, update in zip(group["params"], updates, strict=True):
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update.view_as(p), alpha=-group["lr"])

    def _low_rank(self, matrices: list[nn.Parameter], momentum: float) -> Iterator[Tensor]:
        kept = [self._kept(p) for p in matrices]
        for state, p in zip(kept, matrices, strict=True):
            state["momentum"] += p.grad.flatten(1)
        left = [torch.linalg.qr(product).Q for product in self._means([s["momentum"] @ s["right"] for s in kept])]
        right = self._means([state["momentum"].T @ p for state, p in zip(kept, left, strict=True)])
        for state, p, r in zip(kept, left, right, strict=True):
            state["momentum"].sub_(p @ r.T, alpha=1 - momentum)
            state["right"] = r / r.norm(dim=0).clamp(min=torch.finfo(torch.float32).tiny)
            yield p @ state["right"].T * max(state["momentum"].shape) ** 0.5

    def _signs(self, parameters: list[nn.Parameter], momentum: float) -> Iterator[Tensor]:
        for p, grad in zip(parameters, self._means([p.grad for p in parameters]), strict=True):
            velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
            velocity.mul_(momentum).add_(grad)
            yield grad.add(velocity, alpha=momentum).sign()

    def _kept(self, p: nn.Parameter) -> dict[str, Tensor]:
        """A matrix's momentum and the right factor, which is the same on all ranks."""
        state: dict[str, Tensor] = self.state[p]
        if not state:
            rows, columns = p.flatten(1).shape
            random = torch.Generator().manual_seed(p.numel())
            right = torch.linalg.qr(torch.randn(columns, min(self._rank, rows, columns), generator=random)).Q
            state |= {"momentum": torch.zeros(rows, columns, device=p.device), "right": right.to(p.device)}
        return state

    def _means(self, tensors: list[Tensor]) -> list[Tensor]:
        flat = self.mean(torch.cat([tensor.flatten() for tensor in tensors]))
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


class DionTraining:
    """Trains by :class:`Dion`: those calls of a host that couple the ranks' optimizers. Counts the bytes."""

    def __init__(self, args: argparse.Namespace, host: Host) -> None:
        self._host, self._counted = host, Counted(None, host.size)
        self.replicas = host.replicas

    def compression(self, args: argparse.Namespace, method: str, model: nn.Module, optimizer: Optimizer) -> Counted:
        return self._counted

    def wrap(self, model: nn.Module, optimizer: Any, compression: Any) -> tuple[nn.Module, Optimizer]:
        self._entries, optimizer.mean = sum(p.numel() for p in model.parameters()), self._mean
        return model, optimizer

    def _mean(self, tensor: Tensor) -> Tensor:
        self._counted.wire.count_request(allreduce(tensor), self._host.size)
        return self._host.sum(tensor) / self._host.size

    def synchronize(self, optimizer: Any) -> None:
        """Gradients are not averaged."""

    def update(self, optimizer: Any) -> None:
        wire = self._counted.wire
        wire.begin_step()
        wire.count_gradient(self._entries, self._host.size)
        optimizer.step()
        wire.end_step()
        self._counted.steps += 1
