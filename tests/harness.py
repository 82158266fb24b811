"""N ranks, threads of one process, drive a compressor as its host would: Horovod's protocol, DDP's hook, a loop."""

import copy
import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from fake_ddp import FakeBucket, in_backward
from models import compressed, equal, gradients, mixed_model
from torch import Tensor

from hvd_compress import IWP, Compressor, average_gradients, ddp_hook
from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.codecs import Cast
from hvd_compress.engine.collectives import Nodes, allreduce

Build = Callable[..., Compressor]

HOSTS = ("horovod", "ddp")


def on_hosts_in_turn(test: Callable[..., None]) -> Callable[..., None]:
    """``host``: in the short run, one for each combination of the other parameters."""
    return pytest.mark.alternate("host")(pytest.mark.parametrize("host", KINDS)(test))


def toy_model() -> torch.nn.Module:
    """A model that can be trained: 32 inputs, 8 outputs."""
    torch.default_generator.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32), torch.nn.Linear(32, 8)
    )


class Rank:
    """One rank: its replica, its compressor, and a step as Horovod takes it."""

    ordered = False

    def __init__(self, world: ThreadWorld, rank: int, model: torch.nn.Module, build: Build, /, **options: Any) -> None:
        self.world, self.rank, self.model = world, rank, copy.deepcopy(model)
        self.collectives = world.collectives(rank)
        self.compression = build(self.model.named_parameters(), collectives=self.collectives, **options)
        self.steps = 0

    def move_to(self, world: ThreadWorld, rank: int) -> None:
        """The set of ranks changes, as with hvd.init() after a failure."""
        self.world, self.rank, self.collectives, self.steps = world, rank, world.collectives(rank), 0
        set_collectives(self.compression, self.collectives)

    def exchange(self, grads: Sequence[Tensor | None], shuffle: int | None = None) -> list[Tensor]:
        """Passes the gradients to the compressor, in an order that differs between ranks if ``shuffle`` is given.
        Returns what the host would leave in ``p.grad``.

        None is the gradient of a parameter that is unused on this rank: zeros, passed last, as ``synchronize()`` does.
        """
        order, late = [], []
        for number, (parameter, grad) in enumerate(zip(self.model.parameters(), grads, strict=True)):
            (late if grad is None else order).append(number)
            parameter.grad = torch.zeros_like(parameter) if grad is None else grad
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
            with torch.no_grad():  # autograd does not see Horovod's writing
                payload.copy_(handle.result() * (1.0 / self.world.size))
            result = self.compression.decompress(payload, ctx)
            assert result.shape == parameters[number].shape and result.dtype == parameters[number].grad.dtype
            parameters[number].grad.set_(result)
        return self.applied()

    def applied(self) -> list[Tensor]:
        """The averages count as applied by an update of the test's own, which may follow."""
        parameters = list(self.model.parameters())
        with torch.no_grad():
            torch._foreach_add_(parameters, 0.0)
        self.steps += 1
        return [p.grad for p in parameters]


def set_collectives(compression: Compressor, collectives: Any) -> None:
    """Replaces the collectives of a compressor. With nodes, of as many ranks as before."""
    engine = compression.engine
    nodes = Nodes(collectives)
    if engine.nodes.inside is not None:
        nodes = collectives.in_nodes(collectives.size // engine.nodes.ranks)
    engine.collectives = engine.comparison._collectives = collectives
    engine.nodes = engine.exchanges.nodes = nodes
    compression.collectives = nodes.between
    for work in engine.works:
        if "values" in work.parts:
            work.values._collectives = nodes.between


class DDPRank(Rank):
    """One rank, and a step as DistributedDataParallel takes it: buckets that are the same on all ranks."""

    ordered = True

    def buckets(self, grads: Sequence[Tensor | None], shuffle: int | None = None) -> list[FakeBucket]:
        """The gradients in DDP's buckets: last parameter first, or, with ``shuffle``, in another order and division,
        equal on all ranks. A parameter that is unused on this rank (None) has zeros."""
        given = dict(zip(self.model.parameters(), grads, strict=True))
        order = list(reversed(given))
        rng = random.Random(0 if shuffle is None else shuffle)
        if shuffle is not None:
            rng.shuffle(order)

        def dtype_of(p: Tensor) -> torch.dtype:
            grad = given[p]
            return p.dtype if grad is None else grad.dtype

        groups: list[list[torch.nn.Parameter]] = []
        for p in order:
            if not groups or dtype_of(groups[-1][0]) != dtype_of(p) or rng.random() < 0.4:
                groups.append([])
            groups[-1].append(p)
        result = []
        for number, group in enumerate(groups):
            flat = torch.zeros(sum(p.numel() for p in group), dtype=dtype_of(group[0]), device="cpu")
            bucket = FakeBucket(number, group, flat, number == len(groups) - 1)
            for p, view in zip(group, bucket.gradients(), strict=True):
                if given[p] is not None:
                    view.copy_(given[p])
            result.append(bucket)
        return result

    def exchange(self, grads: Sequence[Tensor | None], shuffle: int | None = None) -> list[Tensor]:
        buckets, futures = self.buckets(grads, shuffle), []
        in_backward(lambda: futures.extend(ddp_hook(self.compression, bucket) for bucket in buckets))
        for bucket, future in zip(buckets, futures, strict=True):
            assert future.done() and future.value() is bucket.flat
            for p, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
                p.grad = grad.detach().clone(memory_format=torch.preserve_format)
        return self.applied()


class LoopRank(Rank):
    """One rank, and a step as a user's own loop takes it."""

    ordered = True

    def exchange(self, grads: Sequence[Tensor | None], shuffle: int | None = None) -> list[Tensor]:
        for parameter, grad in zip(self.model.parameters(), grads, strict=True):
            parameter.grad = grad
        average_gradients(self.compression)
        return self.applied()


KINDS = {"horovod": Rank, "ddp": DDPRank, "loop": LoopRank}


#: Nodes, and ranks of each, for :func:`replicas`.
NODES = [pytest.param((nodes, ranks), id=f"{nodes}x{ranks}") for nodes, ranks in ((2, 2), (2, 3))]


def replicas(
    size: int | tuple[int, int],
    build: Build,
    model: torch.nn.Module | None = None,
    host: str = "horovod",
    **options: Any,
) -> tuple[ThreadWorld, list[Rank]]:
    """``size`` ranks of one model under ``host``, or so many nodes of so many ranks, each with its own compressor."""
    kind = KINDS[host]
    if isinstance(size, tuple):
        options["nodes"], size = size[0], math.prod(size)
    world = ThreadWorld(size, ordered=kind.ordered)
    model = mixed_model() if model is None else model  # a compiled one may have no truth value
    return world, [kind(world, rank, model, build, **options) for rank in range(size)]


def single(model: torch.nn.Module | None = None, **options: Any) -> IWP:
    """IWP alone, with one rank."""
    model = mixed_model() if model is None else model  # a compiled one may have no truth value
    return IWP(model.named_parameters(), collectives=ThreadWorld(1).collectives(0), **options)


def together(
    world: ThreadWorld, ranks: list[Rank], grads: Sequence[Sequence[Tensor | None]], shuffle: int | None = None
) -> list[list[Tensor]]:
    """One step of all ranks at once, in threads. Returns each rank's results."""
    return world.run(lambda i: ranks[i].exchange(grads[i], shuffle))


def random_steps(
    world: ThreadWorld,
    ranks: list[Rank],
    steps: Iterable[int],
    order: int = 0,
    optimizers: Sequence[torch.optim.Optimizer] = (),
) -> list[list[Tensor]]:
    """Steps with gradients seeded by step and rank, each followed by those of optimizers. Returns the last results."""
    for step in steps:
        grads = [gradients(r.model, seed=1000 * step + r.rank) for r in ranks]
        applied = together(world, ranks, grads, shuffle=order + step)
        for optimizer in optimizers:
            optimizer.step()
    return applied


def sgd(ranks: Iterable[Rank], lr: float = 0.0, **options: Any) -> list[torch.optim.Optimizer]:
    """One optimizer a rank."""
    return [torch.optim.SGD(rank.model.parameters(), lr=lr, **options) for rank in ranks]


def without_loss(
    world: ThreadWorld, ranks: list[Rank], grads: Sequence[Sequence[Tensor | None]], shuffle: int | None = None
) -> list[list[Tensor]]:
    """A step as :func:`together`, in which all ranks get the same bits and no entry is lost: the sum of residuals and
    gradients is the number of ranks times what is applied, plus the residuals afterwards. In nodes of several ranks the
    residual is of their mean gradient."""
    compression, before = ranks[0].compression, [residuals(r) for r in ranks]
    options, whole = compression.options(), not compression.buckets
    given = [[None if g is None else g.to(torch.float64, copy=True) for g in grad] for grad in grads]
    applied = together(world, ranks, grads, shuffle)
    assert all(equal(applied[0], other) for other in applied[1:])
    after, per_node = [residuals(r) for r in ranks], compression.engine.nodes.ranks
    for number, (name, p) in enumerate(ranks[0].model.named_parameters()):
        total = per_node * sum(held[name] for held in before)
        total = total + sum(grad[number] for grad in given if grad[number] is not None)
        got = world.size * applied[0][number].double() + per_node * sum(held[name] for held in after)
        # Only an allreduce of 16-bit floats rounds.
        rounds = options["values" if compressed(p) or whole else "dense_values"] in ("fp16", Cast("fp16"))
        torch.testing.assert_close(got, total, rtol=0, atol=5e-2 if rounds else 1e-4)
    return applied


def waiting_average(build: Build, host: str = "horovod") -> tuple[ThreadWorld, list[Rank]]:
    """Two ranks with an average that nobody has applied, after some that an optimizer has. Each has its ``optimizer``,
    of learning rate 0."""
    world, ranks = replicas(2, build, host=host)
    optimizers = sgd(ranks)
    random_steps(world, ranks, range(3), optimizers=optimizers)
    for rank, optimizer in zip(ranks, optimizers, strict=True):
        rank.optimizer = optimizer
        rank.applied = lambda rank=rank: [p.grad for p in rank.model.parameters()]
    random_steps(world, ranks, [3])
    for rank in ranks:
        del rank.applied
    return world, ranks


def train(world: ThreadWorld, ranks: list[Rank], steps: int) -> list[float]:
    """Trains :func:`toy_model` on different data on each rank. Returns the last losses."""
    optimizers = [torch.optim.SGD(r.model.parameters(), lr=0.01) for r in ranks]

    def body(i: int) -> float:
        rank, generator = ranks[i], torch.Generator().manual_seed(i)
        for step in range(steps):
            x = torch.randn(8, 32, generator=generator)
            loss = (rank.model(x) - x[:, :8].sin()).square().mean()
            grads = torch.autograd.grad(loss, list(rank.model.parameters()))
            rank.exchange([g.clone() for g in grads], shuffle=step)
            optimizers[i].step()
            optimizers[i].zero_grad()
        return float(loss.detach())

    return world.run(body)


def residuals(rank: Rank) -> dict[str, Tensor]:
    """By parameter name, in the parameter's shape and double precision; zeros for an uncompressed parameter."""
    return {name: rank.compression.residual(name).double() for name, _ in rank.model.named_parameters()}
