"""Horovod's protocol without Horovod: N ranks in threads drive a compressor as ``DistributedOptimizer`` would."""

import copy
import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hvd_compress import Compressor
from hvd_compress.engine.collectives import allreduce
from hvd_compress.hosts.threads import ThreadWorld

Build = Callable[..., Compressor]


def mixed_model(seed: int = 0) -> torch.nn.Module:
    """Shapes that matter: a small conv (dense), padding, a channels_last conv, biases, a norm, several buckets'
    worth."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential()
    model.first = torch.nn.Conv2d(3, 8, 3)
    model.norm = torch.nn.BatchNorm2d(8)
    model.conv = torch.nn.Conv2d(8, 33, 3).to(memory_format=torch.channels_last)
    model.wide = torch.nn.Linear(301, 47)
    model.deep = torch.nn.Linear(64, 64, bias=False)
    return model


def gradients(model: torch.nn.Module, seed: int, scale: float = 1.0) -> list[Tensor]:
    """One random gradient a parameter, of the parameter's memory order."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator) * scale) for p in model.parameters()]


class Scheduled:
    """A density schedule without a memory: whatever a function says of the step."""

    def __init__(self, density: Callable[[int], float]) -> None:
        self.density = density

    def __call__(self, step: int) -> float:
        return self.density(step)

    def restart(self) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        pass


class Rank:
    """One rank: its replica, its compressor, and a step as Horovod takes it."""

    def __init__(self, world: ThreadWorld, rank: int, model: torch.nn.Module, build: Build, **options: Any) -> None:
        self.world, self.rank, self.model = world, rank, copy.deepcopy(model)
        self.collectives = world.collectives(rank)
        self.compression = build(self.model.named_parameters(), collectives=self.collectives, **options)
        self.steps = 0

    def move_to(self, world: ThreadWorld, rank: int) -> None:
        """The ranks were formed anew, as hvd.init() does after a failure."""
        self.world, self.rank, self.collectives, self.steps = world, rank, world.collectives(rank), 0
        self.compression.engine.collectives = self.compression.engine.exchanges.engine.collectives = self.collectives

    def exchange(self, grads: Iterable[Tensor | None], shuffle: int | None = None) -> list[Tensor]:
        """Gives the gradients to the compressor in an order of its own and returns what Horovod would leave in
        ``p.grad``.

        A gradient of None is a parameter unused on this rank: zeros, handed in last, as ``synchronize()`` does.
        """
        order, late = [], []
        for number, (parameter, grad) in enumerate(zip(self.model.parameters(), grads, strict=True)):
            (late if grad is None else order).append(number)
            parameter.grad = torch.zeros(parameter.shape) if grad is None else grad
        rng = random.Random(None if shuffle is None else shuffle * 1009 + self.rank)
        if shuffle is not None:
            rng.shuffle(order)
            rng.shuffle(late)
        parameters = list(self.model.parameters())
        pending = []
        for number in order + late:
            payload, ctx = self.compression.compress(parameters[number].grad)
            assert payload.is_contiguous() and payload.dtype in (torch.float32, torch.float16, torch.float64)
            name = f"horovod.{self.steps}.{number}"
            pending.append((number, self.collectives.start(allreduce(payload), name), payload, ctx))
        if shuffle is not None:
            rng.shuffle(pending)
        for number, handle, payload, ctx in pending:
            payload.copy_(handle.result() * (1.0 / self.world.size))
            result = self.compression.decompress(payload, ctx)
            assert result.shape == parameters[number].shape and result.dtype == parameters[number].dtype
            parameters[number].grad.set_(result)
        self.steps += 1
        return [p.grad for p in parameters]


def replicas(
    size: int, build: Build, model: torch.nn.Module | None = None, **options: Any
) -> tuple[ThreadWorld, list[Rank]]:
    """``size`` ranks of one model, each with a compressor of its own."""
    world = ThreadWorld(size, timeout=20)
    model = model or mixed_model()
    return world, [Rank(world, rank, model, build, **options) for rank in range(size)]


def together(
    world: ThreadWorld, ranks: list[Rank], grads: list[list[Tensor | None]], shuffle: int | None = None
) -> list[list[Tensor]]:
    """One step of all ranks at once, in threads: what each is left with."""
    return world.run(lambda i: ranks[i].exchange(grads[i], shuffle))


def random_steps(world: ThreadWorld, ranks: list[Rank], steps: Iterable[int], order: int = 0) -> list[list[Tensor]]:
    """Steps with gradients seeded by step and rank; the last step's results."""
    for step in steps:
        grads = [gradients(r.model, seed=1000 * step + r.rank) for r in ranks]
        applied = together(world, ranks, grads, shuffle=order + step)
    return applied


def residuals(rank: Rank) -> dict[str, Tensor]:
    """By parameter name, in the parameter's shape and double precision; zeros where it travels dense."""
    return {name: rank.compression.residual(name).double() for name, _ in rank.model.named_parameters()}
