"""What Horovod's own tests require of its optimizer, with a compressor in it. Also run without one: method "stock".

Written anew after the behaviours that test/parallel/test_torch.py of Horovod 0.28.1 covers. Parameters of any size are
compressed, at a low density.
"""

import copy
import warnings
from contextlib import nullcontext

import horovod.torch as hvd
import job
import pytest
import torch
from cases import Cases, refused, register
from job import DEVICE, Accounts
from optimizer_job import OPTIMIZERS, assert_equal, batch, distributed, loss_of, network, step

CASES: Cases = {}

#: These select by weights, which must be the same on all ranks from the first step.
NEED_EQUAL_WEIGHTS = ("mipd", "slimdp")


@register(CASES, named=True)
def dynamic_requires_grad() -> None:
    """Two networks are trained in turn, the other one's gradients switched off.

    Gradients are checked after ``synchronize()``. Between ``backward()`` and that, they are the compressor's.
    """
    generator, critic = network(1, 10), network(10, 1)
    optimizers = [distributed(model, torch.optim.SGD(model.parameters(), lr=0.01)) for model in (generator, critic)]
    accounts = [Accounts(m, c) for m, (_, c) in zip((generator, critic), optimizers, strict=True)]
    for turn in range(2 * 10):
        active, idle = turn % 2, 1 - turn % 2
        models = (generator, critic)
        for number, model in enumerate(models):
            model.requires_grad_(number == active)
        before = [p.detach().clone() for p in models[idle].parameters()]
        for optimizer, _ in optimizers:
            optimizer.zero_grad()
        loss = critic(generator(batch(50, 1))).sum()
        accounts[active].give(loss)
        loss.backward()
        optimizer = optimizers[active][0]
        optimizer.synchronize()
        accounts[active].take()
        assert all(p.grad is None or not p.grad.any() for p in models[idle].parameters())
        with optimizer.skip_synchronize():
            optimizer.step()
        assert all(torch.equal(p, b) for p, b in zip(models[idle].parameters(), before, strict=True))
    for account in accounts:
        account.check()
        assert all(total.any() for total in account.applied.values())
    assert_equal(*generator.parameters(), *critic.parameters())


@register(CASES, named=True)
def broadcast_state_options() -> None:
    """Options that differ between ranks until rank 0's are broadcast, in the middle of training."""
    for make in OPTIMIZERS.values():
        model = network(20, 10, 10)
        options = dict(lr=0.1, decay=0.8) if hvd.rank() == 0 else dict(lr=0.2, decay=0.9)
        optimizer, _ = distributed(model, make(model.parameters(), **options))
        step(optimizer, loss_of(model))
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        group = optimizer.param_groups[0]
        assert abs(group["lr"] - 0.1) < 1e-6
        assert any(abs(v - 0.8) < 1e-6 for v in (*group.get("betas", ()), *group.values()) if isinstance(v, float))
        step(optimizer, loss_of(model))
        assert_equal(*model.parameters())


@register(CASES, named=True)
def broadcast_state() -> None:
    """Rank 0 loads a checkpoint of model and optimizer, the others get them by broadcast."""
    for make in OPTIMIZERS.values():
        model = network(20, 10, 10)
        optimizer, _ = distributed(model, make(model.parameters(), lr=0.05))
        for _ in range(2):
            step(optimizer, loss_of(model))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        model = network(20, 10, 10, same=False)
        optimizer, _ = distributed(model, make(model.parameters(), lr=0.05))
        if hvd.rank() == 0:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), saved[0].values(), strict=True))
        assert_equal(*[x for s in optimizer.state_dict()["state"].values() for x in s.values() if torch.is_tensor(x)])
        step(optimizer, loss_of(model))
        assert_equal(*model.parameters())


@register(CASES, named=True)
def broadcast_without_gradients() -> None:
    """An integer parameter, and the optimizer's state broadcast before the first step."""

    class Indexed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.where = torch.nn.Parameter(torch.tensor([1, 3], dtype=torch.int32), requires_grad=False)
            self.weight = torch.nn.Parameter(torch.rand(4, generator=torch.Generator().manual_seed(1)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.index_select(self.weight, 0, self.where.long()) * x

    model = Indexed().to(DEVICE)
    optimizer, _ = distributed(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert model.where.grad is None and not model.weight.grad.any()
    step(optimizer, model(batch(5, 2)).square().mean())
    assert_equal(model.weight)


@register(CASES, named=True)
def weights_that_differ() -> None:
    """Horovod averages gradients of unequal weights; a method that selects by weights raises an error on every rank."""
    model = network(20, 10, 10, same=False)
    optimizer, _ = distributed(model)
    with refused(RuntimeError, "broadcast") if job.method in NEED_EQUAL_WEIGHTS else nullcontext():
        for _ in range(3):
            step(optimizer, loss_of(model))


@register(CASES, named=True)
def forced_allreduce() -> None:
    """Each rank uses another part of the model; parameters without gradients take part with zeros."""
    for make in OPTIMIZERS.values():
        torch.manual_seed(1)
        model = torch.nn.ModuleList([network(20, 10), network(10, 10), network(10, 10)])
        optimizer, _ = distributed(model, make(model.parameters(), lr=0.01))
        for _ in range(4):
            first = model[1](model[0](batch(8, 20)).relu())
            step(optimizer, (first if hvd.rank() == 0 else model[2](first.relu())).square().mean())
        assert_equal(*model.parameters())


@register(CASES, named=True)
def gradient_clipping() -> None:
    """``synchronize()``, clipping of the averages, ``skip_synchronize()``."""
    model = network(20, 10, 10)
    optimizer, _ = distributed(model)
    for _ in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        (1000.0 * loss_of(model)).backward()
        optimizer.synchronize()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert_equal(norm, *[p.grad for p in model.parameters()])
        with optimizer.skip_synchronize():
            optimizer.step()
        moved = torch.cat([(p.detach() - b).flatten() for p, b in zip(model.parameters(), before, strict=True)])
        assert norm > 0.1 and abs(moved.norm().item() - 0.01) < 1e-4
    assert_equal(*model.parameters())


@register(CASES, named=True)
def synchronize_warning() -> None:
    """``step()`` after ``synchronize()`` without ``skip_synchronize()``: Horovod warns, and averages again."""
    model = network(4, 4)
    optimizer, _ = distributed(model)
    optimizer.zero_grad()
    loss_of(model, 4).backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        optimizer.step()
    assert len([w for w in seen if "without optimizer.skip_synchronize()" in str(w.message)]) == 1
    assert_equal(*model.parameters())


@register(CASES, named=True)
def parameter_names() -> None:
    """No names are fine; names of some parameters only, or duplicates, are not."""
    model = network(8, 6, 4)
    optimizer, _ = distributed(model, names=False)
    for _ in range(3):
        step(optimizer, loss_of(model, 8))
    assert_equal(*model.parameters())
    twice = [("weight", p) for p in model.parameters()]
    for named in (list(model.named_parameters())[:1], twice):
        with pytest.raises(ValueError):
            distributed(model, names=False, named_parameters=named)


@register(CASES, named=True)
def groups() -> None:
    """``groups=`` as a number, and as lists of parameters."""
    for lists in (False, True):
        model = network(20, 16, 12, 8)
        parameters = list(model.parameters())
        optimizer, _ = distributed(model, groups=[parameters[:3]] if lists else 2)
        for _ in range(4):
            step(optimizer, loss_of(model))
        assert_equal(*model.parameters())


@register(CASES, named=True)
def several_backward_passes() -> None:
    """``backward_passes_per_step``, changed between two steps. Nothing is lost."""
    model = network(20, 10, 10)
    optimizer, compression = distributed(
        model, torch.optim.SGD(model.parameters(), lr=0.01), backward_passes_per_step=3
    )
    accounts = Accounts(model, compression)
    for turn in range(6):
        passes = 3 if turn < 3 else 2
        if turn == 3:
            optimizer.set_backward_passes_per_step(2)
        optimizer.zero_grad()
        for _ in range(passes):
            loss = loss_of(model)
            accounts.give(loss)
            loss.backward()
        optimizer.synchronize()
        accounts.take()
        with optimizer.skip_synchronize():
            optimizer.step()
    accounts.check()
    assert all(total.any() for total in accounts.applied.values())
    assert_equal(*model.parameters())


@register(CASES, named=True)
def beside_other_collectives() -> None:
    """Asynchronous collectives of the user are in progress during the exchange."""
    model = network(20, 10, 10)
    optimizer, _ = distributed(model)
    for turn in range(3):
        own = [torch.full((i + 1,), float(hvd.rank())) for i in range(20)]
        handles = [hvd.allreduce_async(x, op=hvd.Sum, name=f"own.{turn}.{i}") for i, x in enumerate(own)]
        step(optimizer, loss_of(model))
        total = float(sum(range(hvd.size())))
        assert all(bool((hvd.synchronize(handle) == total).all()) for handle in handles)
    assert_equal(*model.parameters())


@register(CASES, named=True)
def sparse_gradients() -> None:
    """They bypass the compressor."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Embedding(10, 4, sparse=True), torch.nn.Linear(4, 4)).to(DEVICE)
    optimizer, _ = distributed(model)
    for _ in range(3):
        step(optimizer, model(torch.tensor([[1, 2, 4 + hvd.rank()]], device=DEVICE)).square().mean())
    assert_equal(*model.parameters())


@register(CASES, named=True)
def adasum() -> None:
    """Adasum combines parameters' changes, which a compressor passes on unchanged. Horovod has no Adasum with Gloo."""
    if not hvd.mpi_enabled():
        return
    model = network(20, 10, 10)
    optimizer, compression = distributed(model, op=hvd.Adasum)
    for _ in range(3):
        step(optimizer, loss_of(model))
    assert_equal(*model.parameters())
    assert compression is None or compression.stats()["steps"] == 0
