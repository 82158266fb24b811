"""Training scripts under Horovod as users' reports show them: at density 1 the weights are those of stock Horovod, to
the last bit, or what a method must not do does not happen."""

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch
from cases import Cases, refused, register
from job import DEVICE
from torch import Tensor, nn

from hvd_compress import DGC, FFT, IWP, MIPD, DeMo, LocalSteps, PowerSGD, TopK

CASES: Cases = {}
case = register(CASES, named=True)
Build = Callable[..., Any]

exact = partial(TopK, density=1.0, min_numel=256)
LR = 2.0**-8
#: Of DeMo, every way to send signs.
SIGNS: dict[str, Build] = {
    "leaders": partial(DeMo, min_numel=256),
    "gather": partial(DeMo, min_numel=256, exchange="gather"),
    "everything": partial(DeMo, min_numel=256, density=1.0),
    "orthogonal": partial(DeMo, min_numel=256, orthogonal=True),
}
#: Methods for which an average that comes back would count twice.
NOT_LINEAR: dict[str, Build] = {
    **SIGNS,
    "dgc": partial(DGC, density=1 / 16, min_numel=256),
    "momentum": partial(IWP, min_numel=256, momentum=0.9),
}
_names = iter(range(10**6))


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 16))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """In the model's dtype."""
    given = next(model.parameters())
    return (model(x.to(given.dtype) if given.is_floating_point() else x).float() - 1).square().mean()


class Task:
    """A model and its optimizer; ``compression`` is None with stock Horovod. ``period``: of local steps, or 0."""

    def __init__(
        self, build: Build | None, model: nn.Module | None = None, lr: float = LR, period: int = 0, **options: Any
    ) -> None:
        self.model = (network() if model is None else model).to(DEVICE)
        named = list(self.model.named_parameters())
        sets = {key: options[key] for key in ("process_set",) if key in options}
        self.compression = build(named, **sets) if build else None
        plain, self.local = torch.optim.SGD(self.model.parameters(), lr), None
        if period:
            self.optimizer, self.local = plain, LocalSteps(self.compression, plain, period)
        else:
            # Horovod's names must differ between optimizers.
            names = [(f"task{next(_names)}", p) for _, p in named]
            compression = self.compression or hvd.Compression.none
            self.optimizer = hvd.DistributedOptimizer(plain, names, compression, **options)
        self.data = torch.Generator().manual_seed(hvd.rank())

    def backward(self, loss: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        x = torch.randn(8, 16, generator=self.data).to(DEVICE)
        (loss or loss_of)(self.model, x).backward()

    def step(self) -> None:
        self.optimizer.step()
        if self.local is not None:
            self.local.step()

    def train(self, steps: int, **arguments: Any) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.backward(**arguments)
            self.step()

    def weights(self) -> Tensor:
        given = [p.detach() for p in self.model.parameters()]
        parts = [torch.view_as_real(p) if p.is_complex() else p for p in given]
        return torch.cat([part.double().flatten() for part in parts])


def assert_equal(*tasks: Task) -> None:
    """On all ranks."""
    mine = torch.cat([task.weights() for task in tasks])
    assert mine.isfinite().all()
    assert all(torch.equal(mine, other) for other in hvd.allgather(mine[None], name="check.equal"))


def ours_and_stock(script: Callable[[Build | None], list[Task]]) -> None:
    ours, stock = script(exact), script(None)
    assert_equal(*ours)
    assert all(torch.equal(a.weights(), b.weights()) for a, b in zip(ours, stock, strict=True))


# Layers that nobody trains.


def _moved(task: Task, before: list[Tensor]) -> dict[str, float]:
    pairs = zip(task.model.named_parameters(), before, strict=True)
    return {name: float((p.detach() - old).abs().max()) for (name, p), old in pairs}


def _weights(task: Task) -> list[Tensor]:
    return [p.detach().clone() for p in task.model.parameters()]


@case
def frozen_layers_stay():
    """And go on when they are trained again."""
    for build in SIGNS.values():
        for dtype in (torch.float32, torch.bfloat16):
            task = Task(build, network().to(dtype))
            task.train(2)
            task.model[:2].requires_grad_(False)
            before = _weights(task)
            task.train(6)
            moved = _moved(task, before)
            assert all((change == 0) == (name[0] in "01") for name, change in moved.items()), moved
            task.model.requires_grad_(True)
            task.train(2)
            assert all(_moved(task, before).values())
            assert_equal(task)


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def loss(self, x: Tensor, second: bool, zero: bool) -> Tensor:
        y = self.first(x) + (self.second(x) if second else 0)
        rest = 0 * sum(p.sum() for p in self.second.parameters()) if zero else 0
        return (self.head(y.tanh()) - 1).square().mean() + rest


@case
def branches_that_no_rank_uses_stay():
    """With zeros of Horovod's, zeros of ``0 * p.sum()``, several passes, in groups. If one rank uses it, it moves."""
    for build in SIGNS.values():
        for options in ({}, {"zero": True}, {"backward_passes_per_step": 2}, {"zero": True, "groups": 1}):
            zero = options.get("zero", False)
            passes = options.get("backward_passes_per_step", 1)
            task = Task(build, _Branches(), **{k: v for k, v in options.items() if k != "zero"})

            def train(steps: int, second: bool, task: Task = task, passes: int = passes, zero: bool = zero) -> None:
                for _ in range(steps):
                    task.optimizer.zero_grad()
                    for _ in range(passes):
                        task.backward(lambda model, x: model.loss(x, second, zero))
                    task.step()

            train(2, True)
            before = _weights(task)
            train(5, False)
            moved = _moved(task, before)
            assert all((change == 0) == name.startswith("second") for name, change in moved.items()), moved
            if "groups" not in options:  # stock Horovod would wait for ever
                train(1, hvd.rank() == 1)
                assert all(_moved(task, before).values())
            assert_equal(task)


@case
def signs_of_sparse_gradients():
    """``sparse_as_dense`` makes them sparse again after the exchange."""
    for build in SIGNS.values():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(64, 16, sparse=True), nn.Linear(16, 16))
        task = Task(build, model, sparse_as_dense=True)
        before = _weights(task)
        task.train(3, loss=lambda model, x: (model((x * 10).long() % 64) - 1).square().mean())
        assert all(_moved(task, before).values())
        assert_equal(task)


# An average that comes back as a gradient.


def _average(task: Task) -> None:
    task.optimizer.zero_grad()
    task.backward()
    task.optimizer.synchronize()


def _synchronized_twice(task: Task) -> None:
    _average(task)
    task.step()


def _clipped_and_synchronized_twice(task: Task) -> None:
    """The user's own clipping makes new tensors."""
    _average(task)
    for p in task.model.parameters():
        p.grad = p.grad.clamp(-0.1, 0.1)
    task.step()


def _two_passes(task: Task) -> None:
    _average(task)
    task.backward()
    task.optimizer.synchronize()
    with task.optimizer.skip_synchronize():
        task.step()


@case
def averages_that_come_back():
    """Stock Horovod warns, or says nothing: right with linear methods, an error on every rank with the others."""
    for script in (_synchronized_twice, _clipped_and_synchronized_twice, _two_passes):

        def run(build: Build | None, script: Callable[[Task], None] = script) -> list[Task]:
            task = Task(build)
            for _ in range(3):
                script(task)
            return [task]

        ours_and_stock(run)
        for build in NOT_LINEAR.values():
            with refused(RuntimeError, "count twice"):
                run(build)


def _clip(task: Task) -> None:
    _average(task)
    nn.utils.clip_grad_norm_(task.model.parameters(), 1.0)
    with task.optimizer.skip_synchronize():
        task.step()


def _own_update(task: Task) -> None:
    _average(task)
    with torch.no_grad():
        for p in task.model.parameters():
            p -= LR * p.grad
            p.grad.zero_()


def _own_update_then_step(task: Task) -> None:
    _own_update(task)
    task.backward()
    task.step()


def _functional(task: Task) -> None:
    """Gradients that no hook sees."""
    x = torch.randn(8, 16, generator=task.data)
    parameters = {name: p.detach() for name, p in task.model.named_parameters()}

    def loss(p: dict[str, Tensor]) -> Tensor:
        return (torch.func.functional_call(task.model, p, (x,)) - 1).square().mean()

    for p, grad in zip(task.model.parameters(), torch.func.grad(loss)(parameters).values(), strict=True):
        p.grad = grad
    task.step()


def _accumulated(task: Task) -> None:
    task.optimizer.zero_grad()
    for _ in range(2):
        task.backward()
    task.step()


@case
def averages_that_do_not_come_back():
    """Nothing is raised."""
    for script in (_clip, _own_update, _own_update_then_step, _functional, _accumulated):

        def run(build: Build | None, script: Callable[[Task], None] = script) -> list[Task]:
            task = Task(build, backward_passes_per_step=2 if script is _accumulated else 1)
            for _ in range(2):
                script(task)
            return [task]

        ours_and_stock(run)
        for build in NOT_LINEAR.values():
            assert_equal(*run(build))


# Several compressors.


def _both(tasks: list[Task], backward: list[int], step: list[int]) -> None:
    for i in step:
        tasks[i].optimizer.zero_grad()
    for i in backward:
        tasks[i].backward()
    for i in step:
        tasks[i].step()


@case
def tasks_in_another_order():
    """Ranks begin with different tasks, and end the steps of tasks in different orders. One task is not used at first,
    one is built anew."""

    def run(build: Build | None) -> list[Task]:
        tasks = [Task(build, network(i)) for i in range(3)]
        here = (lambda order: order) if hvd.rank() == 0 else (lambda order: order[::-1])
        for _ in range(3):
            _both(tasks, here([0, 1]), here([0, 1]))
        for _ in range(2):
            _both(tasks, here([0, 2, 1]), here([1, 2, 0]))
        tasks[0] = Task(build, network(3))
        for _ in range(2):
            _both(tasks, here([0, 1, 2]), here([0, 1, 2]))
        return tasks

    ours_and_stock(run)


@case
def a_task_that_was_dropped():
    """Before it began. Ranks free its memory at different times: none may still wait for the others there."""

    def run(build: Build | None) -> list[Task]:
        dropped = [Task(build)]
        compression = dropped[0].compression and weakref.ref(dropped[0].compression)
        tasks = [Task(build, network(i)) for i in (1, 2)]
        gc.disable()
        dropped.clear()
        if hvd.rank() == 0:
            gc.collect()
        for _ in range(2):
            _both(tasks, [0, 1][:: 1 - 2 * hvd.rank()], [0, 1])
        gc.enable()
        assert compression is None or compression() is None
        return tasks

    ours_and_stock(run)


@case
def tasks_of_which_one_differs():
    """All ranks raise the error where that one begins; the other goes on."""
    for order in ([0, 1], [0, 1][:: 1 - 2 * hvd.rank()]):
        odd = exact if hvd.rank() == 0 else partial(TopK, density=1 / 8, min_numel=256)
        tasks = [Task(exact), Task(odd)]
        for i in order:
            with refused(RuntimeError, "density: 1 on rank 0; 0.125 on rank 1") if i else nullcontext():
                tasks[i].backward()
        tasks[0].step()
        tasks[0].train(2)
        assert_equal(tasks[0])


@case
def local_steps_beside_an_optimizer():
    tasks = [Task(exact), Task(exact, network(1), period=1)]
    for _ in range(4):
        tasks[0].optimizer.zero_grad()
        for i in [0, 1][:: 1 - 2 * hvd.rank()]:
            tasks[0].backward() if i == 0 else tasks[1].train(1)
        tasks[0].step()
    assert_equal(*tasks)


# What is assumed of a parameter.


@case
def layouts_that_change():
    """Followed, or an error on every rank: those last, see test_horovod_scripts.py."""

    def data(p: nn.Parameter, value: Tensor) -> None:
        p.data = value

    changes: dict[str, tuple[Callable[[nn.Module], object], str | None]] = {
        "half": (lambda m: m.half(), None),
        "other memory": (lambda m: data(m[0].weight, m[0].weight.data.clone()), None),
        "another object": (lambda m: setattr(m, "2", nn.Linear(64, 32)), None),
        "frozen": (lambda m: m[0].requires_grad_(False), None),
        "transposed": (lambda m: data(m[0].weight, m[0].weight.data.t().contiguous().t()), "had strides (16, 1)"),
        "with gaps": (lambda m: data(m[0].weight, m[0].weight.data.repeat(1, 2)[:, :16]), "had strides (16, 1)"),
        "double": (lambda m: m.double(), "gradient is of dtype torch.float64"),
    }

    for change, says in changes.values():

        def run(build: Build | None, change: Callable[[nn.Module], object] = change) -> list[Task]:
            task = Task(build)
            task.train(2)
            torch.manual_seed(1)
            change(task.model)
            task.train(3)
            return [task]

        if says is None:
            ours_and_stock(run)
            continue
        for build in exact, *(partial(method, min_numel=256) for method in (IWP, FFT, DeMo, MIPD, PowerSGD)):
            with refused((ValueError, TypeError), says):
                run(build)


@case
def gradients_of_another_dtype():
    """float32 of bfloat16 weights, which stock Horovod can sum."""

    def run(build: Build | None) -> list[Task]:
        model = network().bfloat16()
        for p in model.parameters():
            p.grad_dtype = torch.float32
        task = Task(build, model)
        for _ in range(5):
            _own_update(task)
        return [task]

    ours_and_stock(run)
    for build in *NOT_LINEAR.values(), *(partial(method, min_numel=256) for method in (IWP, FFT, MIPD, PowerSGD)):
        assert_equal(*run(build))


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.complex, self.real = (nn.Parameter(torch.randn(16, 32, dtype=t)) for t in (torch.cfloat, torch.float32))
        self.scalar = nn.Parameter(torch.ones((), dtype=torch.cdouble))

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.cfloat) @ self.complex * self.scalar.to(torch.cfloat)
        return y.abs() * x.mean() + x @ self.real + y.imag


@case
def complex_parameters():
    """Stock Horovod refuses them; compared with averages of the real pairs."""
    for momentum in (0.0, 0.9):
        task, by_hand = Task(exact, _Complex()), _Complex()
        if momentum:
            task.optimizer.param_groups[0]["momentum"] = momentum
            task.compression.take_momentum(task.optimizer)
        plain = torch.optim.SGD(by_hand.parameters(), LR, momentum=momentum)
        data = copy.deepcopy(task.data.get_state())
        task.train(5)
        generator = torch.Generator()
        generator.set_state(data)
        for _ in range(5):
            plain.zero_grad()
            (by_hand(torch.randn(8, 16, generator=generator)) - 1).square().mean().backward()
            for name, p in by_hand.named_parameters():
                pairs = torch.view_as_real(p.grad) if p.is_complex() else p.grad
                pairs.copy_(hvd.allreduce(pairs.contiguous(), name=f"check.{name}"))
            plain.step()
        for ours, theirs in zip(task.model.parameters(), by_hand.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 if momentum else 0.0)
        assert_equal(task)
