"""Optimizers on averaged gradients: their weights and states are common to all ranks, and move once a round."""

import copy
from collections import UserDict, UserList
from functools import partial

import pytest
import torch
from local_workers import DELAYED, IN_TURN, fail, in_a_new_world, on_both_hosts, resumes_bit_exactly, same, sgd, workers
from methods import SMALL
from models import equal, gradients, mixed_model
from optimizers import muon_and_adamw
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hvd_compress import LocalSteps, NoCompression, Quantized, recipes, reshard
from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.local.averaged_steps import _for_several
from hvd_compress.trainers import CombinedOptimizer

AVERAGED = dict(optimizer=muon_and_adamw, averaged=[1], unsent="buffer")
EXACT = dict(build=NoCompression, **AVERAGED)
LOW_BIT = dict(build=partial(Quantized, **SMALL), **AVERAGED)
#: All parameters, by one optimizer.
ALL = dict(build=NoCompression, averaged=[0], unsent="buffer", period=2)


def held(worker):
    """The parameters of optimizers on averaged gradients."""
    return [p for optimizer in worker.averaged for group in optimizer.param_groups for p in group["params"]]


def averaged(worker):
    return [p.detach().clone() for p in held(worker)]


def states(worker):
    found = [state.get(p, {}) for p in held(worker) for state in [o.state for o in worker.averaged]]
    return [leaf for state in found for _, leaf in sorted(state.items()) if leaf is not None]


def sums(worker):
    return [w.sums for w in worker.local._rounds._common.weights if w.sums is not None]


def mean_gradients(model, steps, ranks):
    """Of all ranks and steps, of every parameter."""
    each = [gradients(model, 100 * step + rank) for step in steps for rank in ranks]
    return [torch.stack(grads).mean(0) for grads in zip(*each, strict=True)]


@pytest.mark.parametrize("mode", [{}, IN_TURN, DELAYED, {"restore_length": True}], ids=str)
@on_both_hosts
def test_weights_and_states_are_common_to_all_ranks_after_every_call(ordered, mode):
    world, group = workers(4, ordered=ordered, **{**LOW_BIT, **mode})
    moved = []
    for step in range(12):
        before = averaged(group[0])
        world.run(lambda i, step=step: group[i].train(1, first=step))
        for other in group[1:]:
            assert equal(averaged(group[0]), averaged(other)) and equal(states(group[0]), states(other))
        moved.append(not equal(before, averaged(group[0])))
    assert any(moved) and not all(moved) and states(group[0])


def test_matrices_take_the_same_steps_as_without():
    results = []
    for given in ([1], []):
        world, group = workers(3, **{**LOW_BIT, "averaged": given})
        world.run(lambda i, group=group: group[i].train(6))
        results.append([w.common for w in group[0].local._rounds._common.weights if w.parameter.dim() == 2])
    assert equal(*results)


def by_hand(make, period, rounds=3, **changes):
    """The weights after some rounds of one optimizer by the mean gradients, its settings raised by hand."""
    model = mixed_model()
    own = make(model.parameters())
    own.param_groups[0].update(changes)
    factor = sum((own.param_groups[0].get("by_hand") or 0.0) ** n for n in range(period))
    for first in range(0, period * rounds, period):
        for p, grad in zip(
            model.parameters(), mean_gradients(model, range(first, first + period), range(4)), strict=True
        ):
            p.grad = grad * factor
        own.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    ("make", "raised"),
    [
        (partial(torch.optim.AdamW, lr=0.01, betas=(0.9, 0.99)), dict(lr=0.03, betas=(0.9**3, 0.99**3))),
        (partial(torch.optim.RMSprop, lr=0.01, alpha=0.9), dict(lr=0.03, alpha=0.9**3)),
        (partial(torch.optim.SGD, lr=0.1), dict(lr=0.1 * 3)),
        (
            partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
            dict(lr=0.1 * 3, momentum=0.9**3, weight_decay=0.1 * (1 + 0.9 + 0.9**2), by_hand=0.9),
        ),
    ],
    ids=["AdamW", "RMSprop", "SGD", "momentum"],
)
def test_one_step_stands_for_those_of_a_period(make, raised):
    world, group = workers(4, **{**ALL, "optimizer": make, "period": 3})
    settings = [copy.deepcopy({k: v for k, v in g.items() if k != "params"}) for g in group[0].averaged[0].param_groups]
    world.run(lambda i: group[i].train(9))
    for worker in group:
        torch.testing.assert_close(worker.weights(), by_hand(make, 3, **raised), rtol=1e-5, atol=1e-6)
        after = [{k: v for k, v in g.items() if k != "params"} for g in worker.averaged[0].param_groups]
        assert after == settings


def test_momentum_of_a_period_is_that_of_its_steps():
    """By equal gradients, SGD's velocity is what dense steps give."""
    make = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    world, (worker,) = workers(1, **{**ALL, "optimizer": make, "period": 4})
    dense = torch.nn.Parameter(torch.zeros(()))
    own = make([dense])
    for _ in range(8):
        for p in (*worker.model.parameters(), dense):
            p.grad = torch.ones_like(p)
        for optimizer in (*worker.optimizers, own):
            optimizer.step()
        world.run(lambda i: worker.local.step())
    expected = own.state[dense]["momentum_buffer"]
    for p in worker.model.parameters():
        velocity = worker.averaged[0].state[p]["momentum_buffer"]
        torch.testing.assert_close(velocity, expected.expand_as(velocity))


def matrix_by(make):
    """One weight matrix, trained by an optimizer on averaged gradients, one rank."""
    _, (worker,) = workers(1, **{**ALL, "optimizer": make, "model": torch.nn.Linear(6, 5, bias=False), "period": 1})
    return worker


def step_by(worker, grad):
    worker.model.weight.grad = grad.clone()
    worker.averaged[0].step()
    worker.local.step()


#: By optimizer of torch.optim, settings with which one step stands for several, and how far the weights may be from H
#: times the last of the H steps, relative to these: decays of weights are taken at once, and so are Nesterov's looks
#: ahead, which a constant gradient makes equal only in the end.
EXACT_STATES = {
    "SGD": [
        ({}, 0),
        ({"momentum": 0.9}, 0),
        ({"momentum": 0.9, "dampening": 0.4, "maximize": True}, 0),
        ({"momentum": 0.9, "nesterov": True}, 0.4),
        ({"momentum": 0.8, "weight_decay": 0.01}, 0.01),
        ({"momentum": 0.9, "foreach": True}, 0),
    ],
    "RMSprop": [({"alpha": 0.9}, 0), ({"alpha": 0.9, "centered": True}, 0)],
    "Adam": [
        ({}, 0),
        ({"betas": (0.8, 0.9), "amsgrad": True}, 0),
        ({"weight_decay": 0.01}, 0.05),
        ({"foreach": True}, 0),
        ({"fused": True}, 0),
    ],
    "AdamW": [({"weight_decay": 0.0}, 0), ({"betas": (0.7, 0.97)}, 0.01), ({"amsgrad": True, "maximize": True}, 0.01)],
    "Adamax": [({}, 0), ({"betas": (0.9, 0.8)}, 0)],
    "Muon": [({"weight_decay": 0.0, "nesterov": False}, 0), ({}, 0.4), ({"momentum": 0.5}, 0.6)],
}
#: Others, or other settings, and why no step of theirs stands for several.
REFUSED = {
    "ASGD": {},  # averages the weights of each step
    "Adadelta": {},  # its rate is a state, which grows by its own steps
    "Adafactor": {},  # decays and rate follow powers of the number of steps
    "Adagrad": {"lr_decay": 0.1},  # a sum of squares
    "LBFGS": {},  # closures
    "NAdam": {},  # its momentum follows a schedule, whose product is a state
    "RAdam": {},  # steps without its second moment until a number of steps, which the powers of betas move
    "RMSprop": {"momentum": 0.9},  # a sum of gradients after they were divided
    "Rprop": {},  # rates grow by each step
    "SparseAdam": {},  # sparse gradients only
}


def test_all_optimizers_of_torch_are_tried():
    names = {name for name, value in vars(torch.optim).items() if isinstance(value, type)} - {"Optimizer"}
    assert names == EXACT_STATES.keys() | REFUSED.keys() and EXACT_STATES.keys() & REFUSED.keys() == {"RMSprop"}


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_whose_step_cannot_stand_for_several_is_refused(name):
    options = {} if name in ("LBFGS", "SparseAdam") else {"lr": 0.1}
    for base in (getattr(torch.optim, name), type("Derived", (getattr(torch.optim, name),), {})):
        with pytest.raises(ValueError, match=f"one step of {base.__name__} cannot stand for several"):
            workers(1, **{**ALL, "optimizer": partial(base, **options, **REFUSED[name])})


@pytest.mark.parametrize("period", [2, 5])
@pytest.mark.parametrize("begun", [0, 4])
@pytest.mark.parametrize(
    ("name", "options", "tolerance"), [(name, *case) for name in EXACT_STATES for case in EXACT_STATES[name]], ids=str
)
def test_states_after_one_step_are_those_of_as_many_by_equal_gradients(name, options, tolerance, begun, period):
    if options.get("dampening") and not begun:
        pytest.skip("the first velocity is the gradient itself, without dampening")
    make = partial(getattr(torch.optim, name), lr=1e-3, **options)
    worker, generator = matrix_by(make), torch.Generator().manual_seed(1)
    for _ in range(begun):  # one call, one step: as without
        step_by(worker, torch.randn(5, 6, generator=generator))
    weight = torch.nn.Parameter(worker.model.weight.detach().clone())
    dense = make([weight])
    dense.load_state_dict(copy.deepcopy(worker.averaged[0].state_dict()))
    grad = torch.randn(5, 6, generator=generator)
    worker.local.period = period
    start = weight.detach().clone()
    for _ in range(period):
        before = weight.detach().clone()
        step_by(worker, grad)
        weight.grad = grad.clone()
        dense.step()
    one, several = worker.averaged[0].state[worker.model.weight], dense.state[weight]
    assert one.keys() == several.keys()
    for key, value in several.items():
        if isinstance(value, torch.Tensor):
            # Coupled decays of weights see the weights of all H steps, or of the first.
            rtol, atol = (1e-3, 1e-5) if options.get("weight_decay") else (1e-5, 1e-7)
            torch.testing.assert_close(one[key], value, rtol=rtol, atol=atol, msg=lambda m, key=key: f"{key}: {m}")
    assert one.get("step") is None or float(one["step"]) == begun + period
    moved, last = worker.model.weight.detach() - start, weight.detach() - before
    assert not equal([moved], [torch.zeros_like(moved)])
    assert (moved - period * last).norm() <= (tolerance + 2e-4) * (period * last).norm()


@pytest.mark.parametrize(
    ("name", "options"), [(name, options) for name in EXACT_STATES for options, _ in EXACT_STATES[name]], ids=str
)
def test_by_a_constant_gradient_steps_of_periods_come_as_far_as_dense_ones(name, options):
    if options.get("centered"):
        pytest.skip("divides by the variance, which goes to 0")
    make = partial(getattr(torch.optim, name), lr=1e-4, **options)
    grad = torch.randn(5, 6, generator=torch.Generator().manual_seed(2))
    worker = matrix_by(make)
    worker.local.period = 4
    weight = torch.nn.Parameter(worker.model.weight.detach().clone())
    dense, far = make([weight]), []
    for count in range(80):
        step_by(worker, grad)
        weight.grad = grad.clone()
        dense.step()
        if count in (59, 79):
            far.append((worker.model.weight.detach().clone(), weight.detach().clone()))
    (one, several), (one_then, several_then) = far
    expected = several_then - several
    assert (one_then - one - expected).norm() <= 0.02 * expected.norm()


def test_the_period_may_change_and_steps_count_calls():
    make = partial(torch.optim.AdamW, lr=0.01)
    world, group = workers(2, **{**ALL, "optimizer": make, "period": 2})
    world.run(lambda i: group[i].train(4))
    for worker in group:
        worker.local.period = 3
    world.run(lambda i: group[i].train(3, first=4))
    world.run(lambda i: group[i].train(1, first=7) and None)
    world.run(lambda i: group[i].local.finish())
    assert same(*group) and equal(states(group[0]), states(group[1]))
    assert {float(state["step"]) for state in group[0].averaged[0].state.values()} == {8.0}


def test_the_learning_rate_follows_a_schedule():
    make = partial(torch.optim.SGD, lr=1.0)
    world, (worker,) = workers(1, **{**ALL, "optimizer": make})
    schedule = torch.optim.lr_scheduler.StepLR(worker.averaged[0], 2, 0.5)
    before = worker.weights()
    for _ in range(4):
        for p in worker.model.parameters():
            p.grad = torch.ones_like(p)
        worker.averaged[0].step()
        world.run(lambda i: worker.local.step())
        schedule.step()
    moved = [a - b for a, b in zip(before, worker.weights(), strict=True)]
    torch.testing.assert_close(moved, [torch.full_like(p, 2 * 1.0 + 2 * 0.5) for p in moved])


def test_loops_of_users():
    """Between rounds nothing moves; gradients are the user's after step(), and hooks of the optimizer may clip them."""
    make = partial(torch.optim.SGD, lr=0.1)
    world, (worker,) = workers(1, **{**ALL, "optimizer": make, "period": 3})
    (optimizer,) = worker.averaged
    p = next(worker.model.parameters())

    def clip(*_):
        if p.grad is not None:
            p.grad.clamp_(max=1.0)

    optimizer.register_step_pre_hook(clip)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(p.grad))
    before = worker.weights()
    for number in range(2):
        optimizer.zero_grad(set_to_none=bool(number))
        for _ in range(2):  # gradients accumulate
            (p.sum() * (number + 0.25)).backward()
        grad = p.grad
        optimizer.step()
        assert p.grad is grad and seen.pop() is grad
        world.run(lambda i: worker.local.step())
        assert equal(before, worker.weights())
    torch.testing.assert_close(sums(worker)[0], torch.full_like(p, 0.5 + 1.0))
    optimizer.zero_grad()
    optimizer.step()  # unused in this call
    assert world.run(lambda i: worker.local.step()) == [True]
    assert seen == [None] and p.grad is None
    torch.testing.assert_close(before[0] - worker.weights()[0], torch.full_like(p, 0.1 * 3 * 0.5))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_post_hooks_may_clear_the_gradients(set_to_none):
    """They had no effect, and gradients of earlier calls were added again."""
    results = []
    for hooked in (True, False):
        world, (worker,) = workers(1, **{**ALL, "optimizer": partial(torch.optim.SGD, lr=0.1), "period": 3})
        (optimizer,), p = worker.averaged, next(worker.model.parameters())
        clear = partial(optimizer.zero_grad, set_to_none)
        if hooked:
            optimizer.register_step_post_hook(lambda *_, clear=clear: clear())
        for number in range(3):
            (p.sum() * (number + 1.0)).backward()
            optimizer.step()
            if not hooked:
                clear()
            world.run(lambda i, worker=worker: worker.local.step())
        results.append([*worker.weights(), *([] if p.grad is None else [p.grad])])
    assert equal(*results) and len(results[0]) == len(worker.weights()) + (not set_to_none)


@pytest.mark.parametrize("numbers", [[1], [0, 1]], ids=str)
def test_a_post_hook_may_step_another_optimizer(numbers):
    results = []
    for hooked in (True, False):
        world, (worker,) = workers(1, **{**EXACT, "averaged": numbers})
        muon, adamw = worker.optimizers
        if hooked:
            adamw.register_step_post_hook(lambda *_, muon=muon: muon.step())
        worker.optimizers = [adamw] if hooked else [adamw, muon]
        world.run(lambda i, worker=worker: worker.train(6))
        results.append(worker.weights())
    assert equal(*results)


class Derived(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


def test_an_optimizer_whose_step_calls_its_bases_takes_gradients_once():
    results = []
    for kind in (torch.optim.SGD, Derived):
        world, (worker,) = workers(1, **{**ALL, "optimizer": partial(kind, lr=0.1, momentum=0.9)})
        world.run(lambda i, worker=worker: worker.train(3))
        results.append([*worker.weights(), *sums(worker), *states(worker)])
    assert equal(*results)


def test_hooks_run_in_the_users_steps_only():
    """So a gradient is clipped once, and what hooks count are calls. Schedulers, which wrap step(), do not warn."""
    make = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    world, (worker,) = workers(1, **{**ALL, "optimizer": make, "period": 3})
    (optimizer,), p, seen = worker.averaged, next(worker.model.parameters()), []
    named = [
        (optimizer.register_step_pre_hook, "before"),
        (optimizer.register_step_post_hook, "after"),
        (register_optimizer_step_pre_hook, "before, all"),
        (register_optimizer_step_post_hook, "after, all"),
    ]
    handles = [register(lambda *_, name=name: seen.append(name)) for register, name in named]

    def clip(*_):
        p.grad.clamp_(max=1.0)

    handles.append(optimizer.register_step_pre_hook(clip))
    schedule, before = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), worker.weights()
    for calls in range(1, 7):
        for each in worker.model.parameters():
            each.grad = torch.full_like(each, 2.0)
        optimizer.step()
        schedule.step()
        counted = seen.copy()
        world.run(lambda i: worker.local.step())
        assert seen == counted and all(seen.count(name) == calls for _, name in named)
        if calls == 3:
            torch.testing.assert_close(before[0] - worker.weights()[0], torch.full_like(p, 0.05 * 3 * 2.71))
            torch.testing.assert_close(before[1] - worker.weights()[1], torch.full_like(before[1], 0.05 * 3 * 2 * 2.71))
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("own", [True, False], ids=["own", "of all"])
def test_hooks_do_not_run_in_the_exchange_where_a_step_calls_its_bases(own):
    sgd([torch.nn.Parameter(torch.ones(1))])  # torch wraps the step of a class when the first object is made
    world, (worker,) = workers(1, **{**ALL, "optimizer": partial(Derived, lr=0.1), "period": 2})
    (optimizer,), seen = worker.averaged, []
    pre = optimizer.register_step_pre_hook if own else register_optimizer_step_pre_hook
    post = optimizer.register_step_post_hook if own else register_optimizer_step_post_hook
    handle, other = pre(lambda *_: seen.append("before")), post(lambda *_: seen.append("after"))
    worker.local_step(0)
    once = seen.copy()
    worker.local_step(1)
    before = worker.weights()
    assert world.run(lambda i: worker.local.step()) == [False] and world.run(lambda i: worker.local.step()) == [True]
    assert seen == 2 * once and once and not equal(before, worker.weights())
    handle.remove()
    worker.local_step(2)
    other.remove()
    worker.local_step(3)
    assert seen == 2 * once + [each for each in once if each == "after"]


def test_hooks_of_other_optimizers_run_meanwhile():
    """Another thread may step one, or be in an exchange, too."""
    one, other = (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2))
    seen, registers = [], (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    handles = [register(lambda optimizer, *_: seen.append(optimizer)) for register in registers]
    with _for_several(other, {}, 2):
        with _for_several(one, {}, 2):
            one.step()
            other.step()
        assert not seen
        one.step()
        other.step()
    assert seen == [one] * 2
    other.step()
    assert seen == [one] * 2 + [other] * 2
    for handle in handles:
        handle.remove()
    one.step()
    assert len(seen) == 4


class Estimating(torch.optim.SGD):
    """Keeps a setting in its groups, as Prodigy, and a count if ``counts``, as Apex's FusedAdam."""

    counts = False

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if any(p.grad is not None for p in group["params"]):
                group["d"] = group.get("d", 1.0) * 2
            if self.counts:
                group["step"] = group.get("step", 0) + 1
        return super().step(closure)


def test_settings_that_an_optimizer_changes_itself_stay():
    world, (worker,) = workers(1, **{**ALL, "optimizer": partial(Estimating, lr=0.1, momentum=0.9)})
    world.run(lambda i: worker.train(6))
    (group,) = worker.averaged[0].param_groups
    assert group["d"] == 2.0**3 and group["lr"] == 0.1 and group["momentum"] == 0.9


def test_a_count_of_steps_in_groups_is_refused():
    """In the first call, in which Apex's FusedAdam begins to count; also of a loaded state, which has the count."""
    counting = type("Counting", (Estimating,), {"counts": True})
    _, (worker,) = workers(1, **{**ALL, "optimizer": partial(counting, lr=0.1)})
    for calls in range(1, 3):
        with pytest.raises(ValueError, match="Counting of on_averaged_gradients counts steps in its parameter groups"):
            worker.local_step(0)
        assert worker.averaged[0].param_groups[0]["step"] == 1, calls


def test_sparse_gradients_are_summed():
    results = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = torch.nn.EmbeddingBag(30, 4, mode="sum", sparse=sparse)
        make = partial(torch.optim.SGD, lr=0.1, momentum=0.5)
        world, (worker,) = workers(1, **{**ALL, "optimizer": make, "model": model})
        for step in range(4):
            worker.averaged[0].zero_grad()
            worker.model(torch.tensor([[step, 3, 3]])).sum().backward()
            worker.averaged[0].step()
            world.run(lambda i, worker=worker: worker.local.step())
        results.append(worker.weights())
    assert equal(*results) and not equal(results[0], [model.weight])


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_unscales_and_skips(fused):
    make = partial(torch.optim.AdamW, lr=0.1, fused=fused)
    world, group = workers(2, **{**ALL, "optimizer": make, "period": 3})
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100) for _ in group]
    for step in range(2):
        for rank, (worker, scaler) in enumerate(zip(group, scalers, strict=True)):
            for p in worker.model.parameters():
                p.grad = torch.full_like(p, 8.0)
            if rank == step == 1:
                p.grad.view(-1)[0] = torch.inf
            scaler.scale(torch.ones(()))
            scaler.step(worker.averaged[0])
            scaler.update()
        world.run(lambda i: group[i].local.step())
    assert [scaler.get_scale() for scaler in scalers] == [8.0, 4.0]
    for worker, times in zip(group, (2, 1), strict=True):
        assert equal(sums(worker), [torch.full_like(p, float(times)) for p in sums(worker)])
    world.run(lambda i: group[i].train(1))
    assert same(*group) and not any(p.isnan().any() for p in group[0].weights())


def test_a_step_that_makes_gradients_is_refused():
    world, (worker,) = workers(1, **ALL)
    with pytest.raises(ValueError, match="takes no closure"):
        worker.averaged[0].step(lambda: 0.0)
    world.run(lambda i: worker.train(2))
    worker.local_step(2)
    with pytest.raises(ValueError, match="takes no closure"):
        worker.averaged[0].step(lambda: 0.0)
    worker.local.close()
    before = worker.weights()
    worker.local_step(3)
    assert not equal(before, worker.weights()) and all(p.grad is not None for p in worker.model.parameters())
    with pytest.raises(ValueError, match="Holding has another inside"):
        workers(1, **{**ALL, "optimizer": lambda parameters: Holding(sgd(parameters))})


class Holding(torch.optim.SGD):
    """Has another optimizer inside."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, lr=0.1)
        self.inner = inner


def test_combined_optimizers_of_trainers():
    """The same as the two by themselves, also with a closure, and whether or not the list has the inner one."""
    results = []
    for whole in (False, True):
        world, group = ThreadWorld(2), []
        for rank in range(2):
            model = mixed_model()
            muon, adamw = muon_and_adamw(model.parameters())
            stepped = CombinedOptimizer([muon, adamw])
            compression = Quantized(model.named_parameters(), collectives=world.collectives(rank))
            given = stepped if whole else muon
            group.append((model, stepped, LocalSteps(compression, given, 2, on_averaged_gradients=adamw)))

        def train(rank, group=group):
            model, optimizer, local = group[rank]
            for step in range(5):

                def closure(step=step):
                    for p, grad in zip(model.parameters(), gradients(model, 100 * step + rank), strict=True):
                        p.grad = grad

                optimizer.step(closure)
                local.step()
            local.end(model)
            return [p.detach() for p in model.parameters()]

        weights, others = world.run(train)
        assert equal(weights, others)
        results.append(weights)
    assert equal(*results)


def test_finish_takes_what_was_summed():
    """Averaged uncompressed, by one step for the calls so far."""
    world, group = workers(2, **{**LOW_BIT, "period": 6})
    exact, others = workers(2, **{**EXACT, "period": 2})
    world.run(lambda i: group[i].train(2))
    exact.run(lambda i: others[i].train(2))
    world.run(lambda i: group[i].local.finish(group[i].model))
    torch.testing.assert_close(averaged(group[0]), averaged(others[0]))
    assert same(*group) and equal(states(group[0]), states(group[1])) and not any(s.any() for s in sums(group[0]))
    assert states(group[0])


def test_end_and_close_give_the_optimizer_back():
    for end in ("end", "close"):
        world, group = workers(2, **{**LOW_BIT, "period": 6})
        world.run(lambda i, group=group: group[i].train(2))
        world.run(lambda i, group=group, end=end: getattr(group[i].local, end)())
        if end == "end":
            assert same(*group) and equal(states(group[0]), states(group[1]))
        before = averaged(group[0])
        group[0].local_step(2)
        assert not equal(before, averaged(group[0]))


def test_a_dropped_object_gives_the_optimizer_back():
    _, (worker,) = workers(1, **ALL)
    worker.train(1)
    before = worker.weights()
    del worker.local, worker.compression
    worker.averaged[0].step()
    assert not equal(before, worker.weights())


def test_other_weights_drop_the_sums():
    world, group = workers(2, **{**EXACT, "period": 3})
    world.run(lambda i: group[i].train(2))
    for worker in group:
        worker.model.load_state_dict(mixed_model(1).state_dict())
    world.run(lambda i: group[i].local.take_weights())
    assert not any(s.any() for s in sums(group[0]))
    world.run(lambda i: group[i].train(3))
    again, others = workers(2, model=mixed_model(1), **{**EXACT, "period": 3})
    again.run(lambda i: others[i].train(3))
    assert equal(averaged(group[0]), averaged(others[0]))


@pytest.mark.parametrize("mode", [{}, {"restore_length": True, **DELAYED}], ids=["at once", "delayed"])
@pytest.mark.parametrize("saved_after", [6, 7, 8])
def test_a_checkpoint_resumes_bit_exactly(mode, saved_after):
    resumes_bit_exactly({**LOW_BIT, **mode}, saved_after=saved_after)


def test_sums_are_each_ranks_own_in_a_checkpoint():
    world, group = workers(
        2, **{**EXACT, "period": 4, "optimizer": lambda p: [torch.optim.AdamW(p, lr=0.1)], "averaged": [0]}
    )
    world.run(lambda i: group[i].train(2))
    saved = world.run(lambda i: group[i].compression.state_dict())
    with pytest.raises(ValueError, match=r"^local_steps.sums of gradients.* differs .*: call local.finish\(\) before"):
        reshard(saved)
    with pytest.raises(RuntimeError, match=r"call finish\(\) before saving"):
        world.run(lambda i: group[i].compression.engine.clock.check_equal_weights())
    world.run(lambda i: group[i].local.finish())
    reshard(world.run(lambda i: group[i].compression.state_dict()))
    world.run(lambda i: group[i].compression.engine.clock.check_equal_weights())


def test_a_state_without_the_rates_of_averages_in_flight_is_refused():
    """Of format 7, too: it is of the days when Muon's momentum was a sum, which the optimizer's own state has."""
    world, group = workers(2, **LOW_BIT)
    world.run(lambda i: group[i].train(4))
    state = world.run(lambda i: group[i].compression.state_dict())[0]
    assert state["format"] == 7
    del state["local_steps"]["in_flight"]["of"]["rates"]
    before = group[0].common(), group[0].weights(), group[0].compression.step
    with pytest.raises(
        ValueError, match=r"^local_steps.in_flight.of.rates: missing from .* \(is it of another version"
    ):
        group[0].compression.load_state_dict(state)
    assert equal(before[0], group[0].common()) and equal(before[1], group[0].weights())
    assert group[0].compression.step == before[2]


@on_both_hosts
@pytest.mark.parametrize("at", range(2))
def test_what_a_failed_exchange_has_summed_is_exchanged_later(at, ordered):
    world, group = workers(2, ordered=ordered, **EXACT)
    fails_in_the_sixth_call(world, group, at)
    world = in_a_new_world(group, ordered)
    assert world.run(lambda i: group[i].train(1, first=6)) == [[True]] * 2
    # As by a period of four calls.
    again, others = workers(2, ordered=ordered, **EXACT)
    again.run(lambda i: others[i].train(3))
    for worker in others:
        worker.local.period = 4
    again.run(lambda i: others[i].train(4, first=3))
    for worker in group:
        torch.testing.assert_close(averaged(worker), averaged(others[0]), rtol=0, atol=0)
        assert equal(states(worker), states(others[0]))


def fails_in_the_sixth_call(world, group, at):
    world.run(lambda i: group[i].train(5))
    for worker in group:
        worker.local_step(5)
        fail(worker, at)
    with pytest.raises(ConnectionError):
        world.run(lambda i: group[i].local.step())


def owed(group):
    """The mean over ranks of what is not applied: residuals and sums."""
    names = [name for name, _ in group[0].model.named_parameters()]
    each = [[w.compression.residual(n).double() + s for n, s in zip(names, sums(w), strict=True)] for w in group]
    return [torch.stack(tensors).mean(0) for tensors in zip(*each, strict=True)]


@pytest.mark.parametrize("at", range(4))
def test_what_a_failed_exchange_has_compressed_is_in_the_residual(at):
    options = {**ALL, "build": partial(Quantized, **SMALL), "period": 3, "optimizer": torch.optim.AdamW}
    world, group = workers(2, ordered=True, **options)
    fails_in_the_sixth_call(world, group, at)
    again, others = workers(2, ordered=True, **options)
    again.run(lambda i: others[i].train(5))
    for worker in others:
        worker.local_step(5)
    torch.testing.assert_close(owed(group), owed(others), rtol=0, atol=1e-6)
    assert equal(averaged(group[0]), averaged(others[0])) and equal(states(group[0]), states(others[0]))


def test_one_rank_is_as_several_equal_ones():
    world, (alone,) = workers(1, **EXACT)
    others, group = workers(3, **EXACT)
    for worker in group:
        worker.rank = 0
    world.run(lambda i: alone.train(6))
    with pytest.warns(UserWarning, match="all ranks have the same gradients"):
        others.run(lambda i: group[i].train(6))
    torch.testing.assert_close(alone.weights(), group[0].weights(), rtol=1e-5, atol=1e-6)


def test_sums_that_are_not_finite_show_in_the_weights_and_leave_the_state_alone():
    world, group = workers(2, **EXACT)
    world.run(lambda i: group[i].train(2))
    group[1].local_step(2)
    p = held(group[1])[0]
    sums(group[1])[0].view(-1)[3] = torch.inf
    group[0].local_step(2)
    world.run(lambda i: group[i].local.step())
    for worker in group:
        entries = held(worker)[0].detach().flatten()
        assert not entries[3].isfinite() and entries[:3].isfinite().all(), p.shape
        assert all(state.isfinite().all() for state in states(worker))
    assert equal(states(group[0]), states(group[1]))
    common = group[0].common(), group[1].common()
    assert equal(*common) and all(tensor.isfinite().all() for tensor in common[0])


def test_settings_that_differ_between_ranks_are_an_error_on_all():
    world, group = workers(2, **LOW_BIT)
    world.run(lambda i: group[i].train(3))
    group[1].averaged[0].param_groups[0]["lr"] *= 2
    for call in (lambda i: group[i].train(3), lambda i: group[i].local.finish()):
        with pytest.raises(RuntimeError, match="lr"):
            world.run(call)


def test_settings_that_are_texts_are_compared():
    def muon(parameters):
        return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.02)

    world, group = workers(2, build=NoCompression, unsent="buffer", period=2, optimizer=muon, averaged=[0])
    world.run(lambda i: group[i].train(2))
    group[1].averaged[0].param_groups[0]["adjust_lr_fn"] = "match_rms_adamw"
    with pytest.raises(RuntimeError, match="lr and other settings"):
        world.run(lambda i: group[i].train(2))


@pytest.mark.parametrize("options", [EXACT, {**LOW_BIT, **IN_TURN}], ids=["at once", "in turn"])
def test_finish_after_unequal_counts_of_calls_says_so_on_all(options):
    """One step of the optimizer stands for as many calls as rank 0's sums are of."""
    world, group = workers(2, **{**options, "period": 8})
    world.run(lambda i: group[i].train(2 + i))
    before = averaged(group[0])
    for _ in range(2):
        said = r"rank 0 in finish\(\) after step\(\) 2, rank 1 in finish\(\) after step\(\) 3: .*equally often"
        with pytest.raises(RuntimeError, match=said):
            world.run(lambda i: group[i].local.finish())
    assert equal(before, averaged(group[0])) and equal(before, averaged(group[1]))
    group[0].train(1, first=2)
    world.run(lambda i: group[i].local.finish())
    assert same(*group) and not equal(before, averaged(group[0]))


def test_states_that_differ_at_the_beginning_are_an_error_on_all():
    world, group = workers(2, **ALL, optimizer=partial(torch.optim.AdamW, lr=0.01))
    dense = group[1].averaged[0]
    dense.state[held(group[1])[0]] = {"step": torch.tensor(1.0)}
    with pytest.raises(RuntimeError, match="on_averaged_gradients"):
        world.run(lambda i: group[i].train(1))


@pytest.mark.parametrize("container", [UserDict, UserList], ids=lambda kind: kind.__name__)
def test_states_in_containers_of_ones_own_are_compared(container):
    world, group = workers(2, **ALL, optimizer=partial(torch.optim.SGD, lr=0.01))
    for rank, worker in enumerate(group):
        mine = torch.tensor([float(rank)])
        worker.averaged[0].state[held(worker)[0]] = {"own": container([mine] if container is UserList else {"a": mine})}
    with pytest.raises(RuntimeError, match="on_averaged_gradients"):
        world.run(lambda i: group[i].train(1))


def test_an_optimizer_that_is_never_stepped_is_told():
    world, group = workers(2, **LOW_BIT)
    for worker in group:
        worker.optimizers.pop()
    with pytest.warns(UserWarning, match=r"AdamW.step\(\) was not called since the last exchange"):
        world.run(lambda i: group[i].train(6))


def test_a_step_that_creates_the_state_does():
    """As torch.distributed.checkpoint and hvd.broadcast_optimizer_state() take it."""
    world, group = workers(2, **LOW_BIT)
    for begun in (False, True):
        if begun:
            world.run(lambda i: group[i].train(1))
        (optimizer,) = group[0].averaged
        assert not optimizer.state
        for p in held(group[0]):
            p.grad = torch.zeros_like(p)
        rate, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], 0.0
        optimizer.step()
        optimizer.param_groups[0]["lr"] = rate
        assert optimizer.state
        optimizer.state.clear()


@pytest.mark.parametrize("zero", [[1], [0, 1]], ids=str)
def test_first_gradients_of_zero_create_no_state_of_a_ranks_own(zero):
    """That of one rank was an error on all, and that of all counted as a step."""
    world, group = workers(2, **{**ALL, "optimizer": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.5)})
    before = averaged(group[0])

    def body(i):
        for p in held(group[i]):
            p.grad = torch.zeros_like(p) if i in zero else torch.ones_like(p)
        group[i].averaged[0].step()
        group[i].local.step()

    world.run(body)
    assert not states(group[0]) and not states(group[1])
    assert equal(before, averaged(group[0])) and equal(before, averaged(group[1]))
    world.run(lambda i: group[i].train(5, first=1))
    assert same(*group) and equal(states(group[0]), states(group[1]))
    assert all(state["step"] == 6 for state in group[0].averaged[0].state.values())


def test_a_state_that_is_loaded_after_its_creation_stays():
    """Also if a GradScaler skips the first step."""
    world, group = workers(2, **{**ALL, "optimizer": partial(torch.optim.AdamW, lr=0.01)})
    loaded = workers(1, **{**ALL, "optimizer": partial(torch.optim.AdamW, lr=0.01)})[1][0]
    loaded.local.close()
    loaded.local_step(0)
    for worker in group:
        for p in held(worker):
            p.grad = torch.zeros_like(p)
        worker.averaged[0].step()
        worker.averaged[0].load_state_dict(loaded.averaged[0].state_dict())
    world.run(lambda i: group[i].local.step())
    assert equal(states(group[0]), states(loaded)) and equal(states(group[1]), states(loaded))


def test_a_created_state_is_dropped_also_where_no_first_step_is_skipped():
    """A GradScaler that skipped the first step on one rank only made states that differ, an error on all."""
    world, group = workers(2, **{**ALL, "optimizer": partial(torch.optim.Adam, lr=0.01)})
    for worker in group:
        for p in held(worker):
            p.grad = torch.zeros_like(p)
        worker.averaged[0].step()
        assert states(worker)
    world.run(lambda i: group[i].train(1) if i else group[i].local.step())
    world.run(lambda i: group[i].train(3, first=1))
    assert same(*group) and equal(states(group[0]), states(group[1]))
    assert all(state["step"] == 4 for state in group[0].averaged[0].state.values())


def test_a_schedule_that_begins_with_zero_creates_no_state_of_a_ranks_own():
    world, group = workers(2, **LOW_BIT)
    for worker in group:
        worker.averaged[0].param_groups[0]["lr"] = 0.0
    world.run(lambda i: group[i].train(2))
    assert not states(group[0])
    world.run(lambda i: group[i].train(1, first=2))
    assert states(group[0]) and equal(states(group[0]), states(group[1]))


def test_frozen_parameters_stay():
    world, group = workers(2, **LOW_BIT)
    world.run(lambda i: group[i].train(3))
    frozen = held(group[0])[0].detach().clone()
    for worker in group:
        held(worker)[0].requires_grad_(False)
    world.run(lambda i: group[i].train(3, first=3))
    assert torch.equal(frozen, held(group[0])[0]) and equal(averaged(group[0]), averaged(group[1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    world, group = workers(2, model=mixed_model().to(dtype), **LOW_BIT)
    world.run(lambda i: group[i].train(6))
    assert equal(averaged(group[0]), averaged(group[1])) and equal(states(group[0]), states(group[1]))
    assert not equal(averaged(group[0]), [p for p in mixed_model().to(dtype).parameters() if p.dim() != 2])


def test_the_recipe_sends_as_many_bytes():
    sent = []
    for both in (False, True):
        world, group = ThreadWorld(2), []
        for rank in range(2):
            model = mixed_model()
            muon, adamw = muon_and_adamw(model.parameters())
            given = dict(on_averaged_gradients=adamw) if both else {}
            optimizers = muon if both else [muon, adamw]
            local = recipes.low_bit(model, optimizers, 2, collectives=world.collectives(rank), **given)
            group.append((model, [muon, adamw], local))

        def train(rank, group=group):
            model, optimizers, local = group[rank]
            for step in range(4):
                for p, grad in zip(model.parameters(), gradients(model, 100 * step + rank), strict=True):
                    p.grad = grad
                for optimizer in optimizers:
                    optimizer.step()
                local.step()
            return local.compression.stats()["total"]["wire_bytes"], local.compression.stats()["total"]["dense_bytes"]

        sent.append(world.run(train)[0])
    (before, dense), (after, also_dense) = sent
    assert dense == also_dense and after < before  # no lengths of sums are exchanged
    assert before - after == pytest.approx(0, abs=8 * 12 * 2 * 2)


def test_what_was_not_sent_of_gradients_is_no_part_of_weights():
    model = mixed_model()
    optimizers = muon_and_adamw(model.parameters())
    with pytest.raises(ValueError, match='use unsent="buffer"'):
        compression = Quantized(model, collectives=ThreadWorld(1).collectives(0))
        LocalSteps(compression, optimizers, 3, unsent="weights", on_averaged_gradients=optimizers[1])


def test_a_step_that_fails_leaves_settings_and_counts_as_they_were():
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([p], lr=0.1, betas=[0.9, 0.99])
    p.grad = torch.ones(2)
    optimizer.step()
    with pytest.raises(OSError), _for_several(optimizer, {p: torch.ones(2)}, 3):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.3)
        assert optimizer.param_groups[0]["betas"] == pytest.approx((0.9**3, 0.99**3))
        raise OSError
    assert optimizer.param_groups[0]["lr"] == 0.1 and tuple(optimizer.param_groups[0]["betas"]) == (0.9, 0.99)
    assert optimizer.state[p]["step"] == 1
