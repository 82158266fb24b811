"""Training scripts as users write them, at density 1: the weights are those of the host without compression, to the
last bit (with two ranks, whose sum does not depend on the order)."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import job
import torch
from cases import Cases, register
from job import DEVICE
from methods import EXACT
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CASES: Cases = {}
STEPS = 6
#: Trains with the given function, which makes a model and an optimizer parallel, and returns what must be equal.
Script = Callable[[Callable[..., Any]], list[Tensor]]


def same_as_stock(script: Script) -> None:
    def run() -> None:
        ours, stock = script(_equip(EXACT[job.family()])), script(_equip(None))
        assert len(ours) == len(stock) > 2
        for number, (a, b) in enumerate(zip(ours, stock, strict=True)):
            assert torch.equal(a, b), f"tensor {number} differs by up to {(a - b).abs().max():.3g}"

    run.__name__ = script.__name__
    register(CASES, named=True)(run)


def _equip(build: Any) -> Callable[..., Any]:
    def equip(model: nn.Module, optimizer: torch.optim.Optimizer, passes: int = 1, unused: bool = False) -> Any:
        """As job.Job: ``forward``, ``optimizer``, ``compression``."""
        job_ = SimpleNamespace(model=model, plain_optimizer=optimizer, passes=passes, unused=unused)
        # Subtracting and adding block means rounds.
        exact = {"block_means": False} if job.family() == "iwp" else {}
        job_.compression = None if build is None else build(model.named_parameters(), min_numel=256, **exact)
        job_.group = job_.observe = None
        job.host.wrap(job_)
        return job_

    return equip


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 4)).to(DEVICE)


def batches(steps: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(job.host.rank())
    for _ in range(steps):
        x = torch.randn(8, 16, generator=generator)
        yield x.to(DEVICE), x[:, :4].argmax(1).to(DEVICE)


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def loss_of(trained: Any, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(trained.forward(x), y)


def train(trained: Any, steps: int = STEPS, after_step: Callable[[], object] = lambda: None) -> None:
    """The plain training loop."""
    for x, y in batches(steps):
        trained.optimizer.zero_grad()
        loss_of(trained, x, y).backward()
        trained.optimizer.step()
        after_step()


def average(trained: Any, loss: Tensor) -> None:
    """Makes every parameter's gradient the average over ranks."""
    trained.optimizer.zero_grad()
    loss.backward()
    job.host.synchronize(trained)


def apply(trained: Any, step: Callable[[Any], Any] = lambda optimizer: optimizer.step()) -> None:
    with job.host.synchronized(trained):
        step(trained.optimizer)


@same_as_stock
def adamw(equip):
    model = network()
    train(equip(model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)))
    return weights(model)


@same_as_stock
def accumulation_and_clipping(equip):
    model = network()
    trained = equip(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), passes=2)
    pairs = list(batches(2 * STEPS))
    for first, second in zip(pairs[::2], pairs[1::2], strict=True):
        trained.optimizer.zero_grad()
        with job.host.no_sync(trained):
            (loss_of(trained, *first) / 2).backward()
        (loss_of(trained, *second) / 2).backward()
        job.host.synchronize(trained)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        apply(trained)
    return weights(model)


@same_as_stock
def updates_of_ones_own(equip):
    """No optimizer.step() follows the averages, but for the first."""
    model = network()
    trained = equip(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step, (x, y) in enumerate(batches()):
        average(trained, loss_of(trained, x, y))
        if step == 0:
            apply(trained)
            continue
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad.sign()
    return weights(model)


@same_as_stock
def skipped_loss_spikes(equip):
    """Averages are dropped, once after steps that were taken and twice in a row."""
    model = network()
    trained = equip(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step, (x, y) in enumerate(batches()):
        average(trained, loss_of(trained, x, y) * (1000.0 if step in (2, 3) else 1.0))
        if nn.utils.get_total_norm([p.grad for p in model.parameters()]) < 100:
            apply(trained)
    return weights(model)


@same_as_stock
def sam(equip):
    """Sharpness-aware minimisation: the first of two averages moves the weights only for a while."""
    model = network()
    trained = equip(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in batches():
        average(trained, loss_of(trained, x, y))
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        moves = [0.05 * p.grad / norm for p in model.parameters()]
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), moves)
        average(trained, loss_of(trained, x, y))
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)
        apply(trained)
    return weights(model)


def _layers(**layers: nn.Module) -> nn.Sequential:
    """Horovod needs names that differ between the optimizers of a process."""
    return nn.Sequential(OrderedDict(layers))


@same_as_stock
def gan(equip):
    """Two networks and two compressors; the generator's pass also averages the discriminator's gradients, which are
    dropped."""
    torch.manual_seed(0)
    make = _layers(a=nn.Linear(8, 64), b=nn.Tanh(), c=nn.Linear(64, 16)).to(DEVICE)
    judge = _layers(d=nn.Linear(16, 64), e=nn.Tanh(), f=nn.Linear(64, 1)).to(DEVICE)
    maker, critic = (equip(m, torch.optim.Adam(m.parameters(), lr=1e-2)) for m in (make, judge))
    for real, _ in batches():
        judged = critic.forward(torch.cat([maker.forward(real[:, :8]).detach(), real])).sigmoid()
        average(critic, judged[: len(real)].mean() - judged[len(real) :].mean())
        apply(critic)
        critic.optimizer.zero_grad()
        average(maker, -critic.forward(maker.forward(real[:, :8])).sigmoid().mean())
        job.host.synchronize(critic)  # dropped
        apply(maker)
    return weights(make) + weights(judge)


@same_as_stock
def average_of_the_weights(equip):
    """An exponential moving average in a copy of the model."""
    model = network()
    trained = equip(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    train(trained, after_step=lambda: ema.update_parameters(model))
    return weights(ema)


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.body[3:](checkpoint(self.body[:3], x, use_reentrant=False))


@same_as_stock
def gradient_checkpointing(equip):
    model = _Checkpointed()
    train(equip(model, torch.optim.AdamW(model.parameters(), lr=1e-2)))
    return weights(model)


@same_as_stock
def compiled(equip):
    model = network()
    model.compile(backend="aot_eager")
    train(equip(model, torch.optim.AdamW(model.parameters(), lr=1e-2)), steps=3)
    return weights(model)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(64, 16), nn.Linear(16, 64, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table((x * 10).long() % 64).mean(1))


@same_as_stock
def tied_weights(equip):
    model = _Tied().to(DEVICE)
    model.extra = nn.Linear(16, 16).to(DEVICE)  # unused
    train(equip(model, torch.optim.AdamW(model.parameters(), lr=1e-2), unused=True))
    return weights(model)


@same_as_stock
def lbfgs(equip):
    """Several averages a step, most of which only a line search uses."""
    model = network()
    trained = equip(model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=3))
    for x, y in batches(3):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            loss = loss_of(trained, x, y)
            average(trained, loss)
            return job.host.total(loss.detach()) / job.host.size()

        apply(trained, lambda optimizer, closure=closure: optimizer.step(closure))
    return weights(model)
