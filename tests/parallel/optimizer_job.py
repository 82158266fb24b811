"""Models under Horovod's optimizer with the method under test, for tests/parallel/optimizer_cases.py."""

import itertools
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import job
import torch
from horovod_job import gather
from job import DEVICE
from methods import METHODS, fitting

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p, **o: torch.optim.SGD(p, momentum=o.pop("decay", 0.9), nesterov=True, **o),
    "Adam": lambda p, **o: torch.optim.Adam(p, betas=(o.pop("decay", 0.9), 0.99), **o),
    "RMSprop": lambda p, **o: torch.optim.RMSprop(p, alpha=o.pop("decay", 0.9), **o),
    "Adagrad": lambda p, **o: torch.optim.Adagrad(p, lr_decay=o.pop("decay", 0.9), **o),
}


def distributed(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, names: bool = True, **arguments: Any
) -> tuple[Any, Any]:
    """Horovod's optimizer around ``optimizer`` (default: SGD) with the method under test, and the compressor; None for
    "stock"."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    named, compression = list(model.named_parameters()), None
    if job.method != "stock":
        method = METHODS[job.method]
        compression = method(named, min_numel=1, **fitting(method, {"density": 1 / 32}))
        arguments["compression"] = compression
    if names:
        arguments["named_parameters"] = named
    return hvd.DistributedOptimizer(optimizer, **arguments), compression


def network(*sizes: int, same: bool = True) -> torch.nn.Module:
    """Linear layers; with other weights on each rank unless ``same``."""
    torch.manual_seed(1 if same else 10 + hvd.rank())
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return torch.nn.Sequential(*[part for layer in layers for part in (layer, torch.nn.Tanh())][:-1]).to(DEVICE)


def batch(*shape: int) -> torch.Tensor:
    """Other data on each rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 + hvd.rank())).to(DEVICE)


def loss_of(model: torch.nn.Module, inputs: int = 20) -> torch.Tensor:
    """For this rank's :func:`batch`, of a network with so many inputs."""
    return model(batch(8, inputs)).square().mean()


def step(optimizer: Any, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def assert_equal(*tensors: torch.Tensor) -> None:
    """On all ranks."""
    mine = torch.cat([tensor.detach().double().flatten() for tensor in tensors])
    assert mine.isfinite().all()
    everyone = gather(mine)
    assert all(torch.equal(everyone[0], other) for other in everyone)
