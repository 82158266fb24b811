"""A small training job on real ranks, under Horovod or torch DistributedDataParallel."""

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from methods import METHODS, fitting

import hvd_compress
from hvd_compress.engine.exchange import Exchanges

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
#: The host's adapter: :mod:`horovod_job` or :mod:`ddp_job`. Set by check_training.py.
host: Any = None
#: The name of the method under test in tests/methods.py. Set by check_training.py.
method = "iwp"
#: Steps of a case. Set by check_training.py.
steps = 40
#: Into how many nodes the ranks are divided; 0 for none. Set by check_training.py.
nodes = 0


def build(named_parameters: Any, **options: Any) -> Any:
    """The method under test, with the options it accepts."""
    return METHODS[method](named_parameters, **fitting(METHODS[method], options))


def family() -> str:
    return method.partition("-")[0]


def apart(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
    """A backend of torch.compile: torch's "eager", which refuses graphs with operators of the package."""
    package = str(Path(hvd_compress.__file__).parent)
    traces = [trace for node in graph.graph.nodes if (trace := node.stack_trace) and package in trace]
    assert not traces, f"the package is compiled: {traces[0]}"
    return graph.forward


def exchanges_dropped() -> list[str]:
    """A list that takes the label of each compressor that is dropped with an exchange in progress. One rank may have
    started one more of its collectives than another: Horovod ends the job for that 40 s later (launch.py), in a case
    that has nothing to do with it."""
    dropped: list[str] = []

    def note(exchanges: Exchanges) -> None:
        if exchanges.running:
            dropped.append(exchanges.label)

    Exchanges.__del__ = note  # type: ignore[attr-defined]
    return dropped


class Branches(torch.nn.Module):
    """Parallel branches, a small convolution that is not compressed, a dense head. ``order``: the order in which the
    branches run, so that hooks fire in different orders."""

    def __init__(self, width: int = 48, branches: int = 6) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.conv = torch.nn.Conv2d(8, 24, 3, padding=1)
        self.branches = torch.nn.ModuleList(torch.nn.Linear(24, width) for _ in range(branches))
        self.mix = torch.nn.ModuleList(torch.nn.Linear(width, 40) for _ in range(branches))
        self.head = torch.nn.Linear(40, 4)

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        x = self.conv(self.norm(self.stem(x)).relu()).relu().mean((2, 3))
        return self.head(sum(self.mix[i](self.branches[i](x).tanh()) for i in order))


class Job:
    """One replica in training. Every rank runs the branches in its own order, and on rank 1 a branch is unused in
    every third step.

    Args:
        build: makes the compressor; None trains without one.
        unused: whether a branch may be unused.
        passes: backward passes per step.
        group: a sub-group of ranks (a process set of Horovod, a process group of torch).
        wrap: further arguments of the host's wrapper.
    """

    def __init__(
        self,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
        build: Callable[..., Any] | None = build,
        optimizer_momentum: float = 0.0,
        take_momentum: bool = False,
        passes: int = 1,
        unused: bool = True,
        group: Any = None,
        wrap: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.model = Branches().to(DEVICE, dtype)
        if channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)
        self.plain_optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=optimizer_momentum)
        self.compression = None
        if build is not None:
            if nodes and group is None:
                options = {"nodes": nodes, **options}
            self.compression = build(
                self.model.named_parameters(), bucket_mb=0.02, **host.group_argument(group), **options
            )
            if take_momentum:
                self.compression.take_momentum(self.plain_optimizer)
        self.passes, self.dtype, self.unused, self.group = passes, dtype, unused, group
        #: Called with each parameter and its gradient when it reaches the compressor.
        self.observe: Callable[[torch.Tensor, torch.Tensor], None] | None = None
        self.random = random.Random(seed * 100 + host.rank())
        self.data = torch.Generator().manual_seed(seed * 100 + host.rank())
        host.wrap(self, **(wrap or {}))

    def loss(self, step: int) -> torch.Tensor:
        order = list(range(6))
        self.random.shuffle(order)
        if self.unused and step % 3 == 2 and host.rank() == 1:
            order.remove(3)
        x = torch.randn(4, 3, 6, 6, generator=self.data).to(DEVICE, self.dtype)
        target = x.mean((1, 2, 3)).gt(0).long() + 2 * x[:, 0].mean((1, 2)).gt(0).long()
        return torch.nn.functional.cross_entropy(self.forward(x, order).float(), target)

    def backward(self, step: int, scale: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss) -> None:
        """The backward passes of a step, without the exchange in all but the last."""
        for number in range(self.passes):
            with nullcontext() if number == self.passes - 1 else host.no_sync(self):
                scale(self.loss(step)).backward()

    def step(self, step: int) -> None:
        self.backward(step)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def apply(self, step: Callable[[Any], Any] = lambda optimizer: optimizer.step()) -> None:
        """The optimizer's step, after ``host.synchronize(job)``."""
        with host.synchronized(self):
            step(self.optimizer)
        self.optimizer.zero_grad()

    def train(self, count: int | None = None) -> "Job":
        for step in range(steps if count is None else count):
            self.step(step)
        return self

    def assert_equal_replicas(self) -> "Job":
        mine = torch.cat([p.detach().double().flatten() for p in self.model.parameters()]).cpu()
        assert mine.isfinite().all()
        everyone = host.gather(mine, self.group)
        assert all(torch.equal(everyone[0], other) for other in everyone), "replicas differ"
        return self


class Accounts:
    """Of each parameter, in double precision: what this rank gave to the compressor (None: there is none), and what was
    applied. Nothing is lost between them."""

    def __init__(self, model: torch.nn.Module, compression: Any) -> None:
        self.parameters, self.compression = dict(model.named_parameters()), compression
        self.given = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in self.parameters.items()}
        self.applied = copy.deepcopy(self.given)

    def give(self, loss: torch.Tensor) -> None:
        """The gradients of a loss."""
        grads = torch.autograd.grad(loss, list(self.parameters.values()), retain_graph=True, allow_unused=True)
        for total, grad in zip(self.given.values(), grads, strict=True):
            total += 0.0 if grad is None else grad.double().cpu()

    def take(self) -> None:
        """The averages."""
        for name, p in self.parameters.items():
            self.applied[name] += 0.0 if p.grad is None else p.grad.double().cpu()

    def check(self, atol: float = 1e-4) -> None:
        for name, given in self.given.items():
            held = 0.0
            if self.compression is not None:
                held = self.compression.residual(name).double().cpu() * self.compression.engine.nodes.ranks
            everyone = host.total(given - held)
            allowed = atol * (float(given.abs().max()) + 1.0)
            torch.testing.assert_close(host.size() * self.applied[name], everyone, rtol=0, atol=allowed)
