"""What others do with an optimizer reaches each optimizer of a combined one: its state, groups, modes and hooks."""

import copy
import io
import pickle

import pytest
import torch
from models import equal as all_equal
from models import mixed_model
from optimizers import halves, named_and_adamw, steps, two_named
from torch.distributed.checkpoint import state_dict as checkpoints
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from hvd_compress.trainers import CombinedOptimizer


def sgd_and_adamw(model):
    first, second = halves(model)
    return [torch.optim.SGD(first, lr=0.1, momentum=0.9), torch.optim.AdamW(second, lr=0.01)]


class Modes(torch.optim.SGD):
    """As schedule-free optimizers."""

    mode = "train"

    def train(self):
        self.mode = "train"

    def eval(self):
        self.mode = "eval"


def fused_and_stateless(model):
    first, second = halves(model)
    return [torch.optim.AdamW(first, fused=True), torch.optim.SGD(second, lr=0.1)]


KINDS = [sgd_and_adamw, named_and_adamw, two_named, fused_and_stateless]


def equal(one, other):
    return all_equal(one.parameters(), other.parameters())


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def trained(request):
    model = mixed_model()
    optimizer = CombinedOptimizer(request.param(model))
    steps(model, optimizer)
    return model, optimizer, request.param


def states_of_checkpoint(model, optimizer):
    checkpoints.get_optimizer_state_dict(model, optimizer)


def state_by_torch(model, optimizer):
    optimizer.state_dict()


def states_are_read(model, optimizer):
    for p in model.parameters():
        assert p not in optimizer.state or optimizer.state[p] is optimizer.state.get(p)
    assert len(list(optimizer.state)) == len(optimizer.state)


def copied(model, optimizer):
    copy.deepcopy((model, optimizer))
    pickle.dumps((model, optimizer))


@pytest.mark.parametrize("reads", [states_of_checkpoint, state_by_torch, states_are_read, copied])
def test_reading_the_state_changes_no_training(trained, reads):
    model, optimizer, kind = trained
    if reads is states_of_checkpoint and "named" in kind.__name__:
        pytest.skip("torch's function takes torch's form only")
    twin = mixed_model()
    other = CombinedOptimizer(kind(twin))
    steps(twin, other)
    reads(model, optimizer)
    steps(model, optimizer)
    steps(twin, other)
    assert equal(model, twin)


def test_the_state_is_that_of_the_optimizers(trained):
    model, optimizer, _ = trained
    for part in optimizer.optimizers:
        for key, value in part.state.items():
            if isinstance(key, torch.Tensor):
                assert optimizer.state[key] is value
    last = list(model.parameters())[-1]
    optimizer.state[last] = {"new": 1}
    assert optimizer.optimizers[-1].state[last] == {"new": 1} and last not in optimizer.optimizers[0].state
    del optimizer.state[last]
    assert last not in optimizer.optimizers[-1].state
    optimizer.state[last]["made"] = 2
    assert optimizer.optimizers[-1].state[last] == {"made": 2}
    optimizer.state.clear()
    assert not any(part.state for part in optimizer.optimizers) and not optimizer.state


def by_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def by_pickle(state):
    return pickle.loads(pickle.dumps(state))


@pytest.mark.parametrize("carried", [copy.deepcopy, by_a_file, by_pickle])
def test_a_state_resumes_exactly(trained, carried):
    model, optimizer, kind = trained
    twin = copy.deepcopy(model)
    other = CombinedOptimizer(kind(twin))
    schedule = LambdaLR(other, lambda step: 1 / (1 + step))
    other.load_state_dict(carried(optimizer.state_dict()))
    steps(model, optimizer)
    steps(twin, other)
    assert equal(model, twin)
    schedule.step()
    assert all(g["lr"] < 0.1 for part in other.optimizers for g in part.param_groups)


def test_a_state_of_other_groups_is_refused():
    model = mixed_model()
    optimizer = CombinedOptimizer(sgd_and_adamw(model))
    state = CombinedOptimizer(sgd_and_adamw(model)[:1]).state_dict()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(state)


def loads_one(part):
    part.load_state_dict(copy.deepcopy(part.state_dict()))


def unpickled(part):
    part.__setstate__(pickle.loads(pickle.dumps(part.__getstate__())) | {"param_groups": copy.copy(part.param_groups)})


def grows(part):
    part.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))], "lr": 0.1})


@pytest.mark.parametrize("changes", [loads_one, unpickled, grows])
def test_a_schedule_reaches_an_optimizer_that_was_changed_by_itself(changes):
    model = mixed_model()
    optimizer = CombinedOptimizer(sgd_and_adamw(model))
    changes(optimizer.optimizers[1])
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    assert all(group["lr"] == 0.5 for part in optimizer.optimizers for group in part.param_groups)


def test_modes_gradients_and_hooks_reach_the_optimizers():
    model = mixed_model()
    first, second = halves(model)
    modes, plain = Modes(first, lr=0.1), torch.optim.SGD(second, lr=0.1)
    optimizer, seen = CombinedOptimizer([modes, plain]), []
    optimizer.eval()
    assert modes.mode == "eval"
    optimizer.train()
    assert modes.mode == "train"
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    plain.register_step_post_hook(lambda *_: seen.append("part"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.register_state_dict_post_hook(lambda o, state: seen.append("saved"))
    optimizer.register_load_state_dict_pre_hook(lambda o, state: seen.append("loading"))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
    steps(model, optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before", "part", "after", "saved", "loading", "loaded"]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.zero_grad(set_to_none=False)
    assert not any(p.grad.any() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_a_schedule_of_the_momentum_needs_it_in_all_optimizers():
    first, second = halves(mixed_model())
    for others, alike in ((torch.optim.Adam, True), (torch.optim.SGD, False)):
        optimizer = CombinedOptimizer([torch.optim.AdamW(first, lr=0.1), others(second, lr=0.1)])
        if alike:
            OneCycleLR(optimizer, 0.1, 10)
        else:
            with pytest.raises(ValueError, match="must support momentum or beta1"):
                OneCycleLR(optimizer, 0.1, 10)


def test_an_optimizer_that_needs_the_closure_gets_it():
    model, calls = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)), []
    lbfgs, sgd = torch.optim.LBFGS(model[0].parameters()), torch.optim.SGD(model[1].parameters(), lr=0.1)
    optimizer = CombinedOptimizer([lbfgs, sgd])

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        calls.append(loss.item())
        return loss

    assert optimizer.step(closure) == calls[0] and calls[-1] < calls[0]


@pytest.mark.parametrize("skips", [False, True])
def test_a_scaler_unscales_once_and_skips_all(skips):
    """Though a fused optimizer by itself would take the scale."""
    weights = {}
    for scaled in (False, True):
        model = mixed_model()
        optimizer = CombinedOptimizer(fused_and_stateless(model))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaled)
        scaler.scale(torch.ones(1))
        for p in model.parameters():
            p.grad = torch.ones_like(p) * scaler.get_scale()
        if skips and scaled:
            p.grad[0] = torch.inf
        if not skips or scaled:
            scaler.step(optimizer)
        scaler.update()
        weights[scaled] = model
    assert equal(weights[False], weights[True])
