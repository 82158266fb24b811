"""Optimizers' states of any form are saved by each rank and resumed: what an optimizer itself can load."""

import io

import pytest
import torch
from models import equal, mixed_model
from optimizers import named_and_adamw, steps, two_named
from torch import distributed
from torch.distributed.fsdp import fully_shard

from hvd_compress.engine.wrappers import unwrapped
from hvd_compress.trainers import CombinedOptimizer, rank_state


class ByName(torch.optim.SGD):
    """States under names, as torchft's, apex's and optimizers of named parameters."""

    def state_dict(self):
        plain = super().state_dict()
        return {**plain, "state": {f"layer.{number}": state for number, state in plain["state"].items()}}

    def load_state_dict(self, state_dict):
        numbered = {int(name.split(".")[1]): state for name, state in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": numbered})


class Nested(torch.optim.SGD):
    """Groups of groups, tuples and numbers."""

    def state_dict(self):
        plain = super().state_dict()
        return {"version": (1, "a"), "inner": [{"deep": {"state": plain["state"]}}], "groups": plain["param_groups"]}

    def load_state_dict(self, state_dict):
        assert state_dict["version"] == (1, "a")
        state = state_dict["inner"][0]["deep"]["state"]
        super().load_state_dict({"state": state, "param_groups": state_dict["groups"]})


class Nothing(torch.optim.SGD):
    """Saves nothing and needs nothing."""

    def __init__(self, parameters, lr, momentum):
        super().__init__(parameters, lr=lr)

    def state_dict(self):
        return None

    def load_state_dict(self, state_dict):
        assert state_dict is None


class Flat(torch.optim.SGD):
    """One list of tensors."""

    def state_dict(self):
        return [state["momentum_buffer"] for state in self.state.values()]

    def load_state_dict(self, state_dict):
        for p, buffer in zip(self.param_groups[0]["params"], state_dict, strict=True):
            self.state[p]["momentum_buffer"] = buffer


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer, and has slow weights of its own."""

    def __init__(self, optimizer):
        self.optimizer, self.count = optimizer, 0
        super().__init__(optimizer.param_groups, {})
        self.param_groups = optimizer.param_groups
        self.state.update({p: {"slow": p.detach().clone()} for g in self.param_groups for p in g["params"]})

    def step(self, closure=None):
        self.optimizer.step()
        self.count += 1
        if self.count % 3 == 0:
            for p, state in self.state.items():
                state["slow"].lerp_(p.detach(), 0.5)
                p.data.copy_(state["slow"])

    def state_dict(self):
        slow = [state["slow"] for state in self.state.values()]
        return {"inner": self.optimizer.state_dict(), "slow": slow, "count": self.count}

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict["inner"])
        self.param_groups, self.count = self.optimizer.param_groups, state_dict["count"]
        for state, slow in zip(self.state.values(), state_dict["slow"], strict=True):
            state["slow"].copy_(slow)


class GroupsOfTheOther(Lookahead):
    """As pytorch_optimizer has it: a state of its own, and a property for the groups."""

    param_groups = property(lambda self: self.optimizer.param_groups, lambda self, groups: None)

    def add_param_group(self, group):
        pass


def sgd(kind):
    return lambda model: kind(model.parameters(), lr=0.1, momentum=0.9)


def around(wrapper, kind=torch.optim.SGD):
    return lambda model: wrapper(sgd(kind)(model))


KINDS = {
    "torch": sgd(torch.optim.SGD),
    "names": sgd(ByName),
    "nested": sgd(Nested),
    "nothing": sgd(Nothing),
    "a list": sgd(Flat),
    "lookahead": around(Lookahead),
    "lookahead with the other's groups": around(GroupsOfTheOther),
    "lookahead of names": around(Lookahead, ByName),
    "combined, one by names": lambda model: CombinedOptimizer(named_and_adamw(model)),
    "combined, two by names": lambda model: CombinedOptimizer(two_named(model)),
}


class Accelerated(torch.optim.Optimizer):
    """As Accelerate's: a subclass without super().__init__()."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)


class Lightning:
    """As Lightning's."""

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.__class__ = type("LightningSGD", (Lightning, type(optimizer)), {})

    @property
    def optimizer(self):
        return self._optimizer

    def __getattr__(self, name):
        return getattr(self._optimizer, name)


def through_a_file(state):
    """As rank_files: only tensors and plain values."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_a_state_of_any_form_resumes_exactly(make):
    model, twin = mixed_model(), mixed_model()
    optimizer, other = make(model), make(twin)
    steps(model, optimizer)
    state = through_a_file(rank_state.save(model, [optimizer], None))
    rank_state.load(state, twin, [other], None)
    steps(model, optimizer, 4)
    steps(twin, other, 4)
    assert equal(model.parameters(), twin.parameters())


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("wrap", [Accelerated, Lightning, lambda o: Accelerated(Accelerated(o))], ids=["a", "l", "aa"])
def test_wrappers_are_removed_and_nothing_else(make, wrap):
    optimizer = make(mixed_model())
    assert unwrapped(wrap(optimizer)) is optimizer and unwrapped(optimizer) is optimizer


@pytest.fixture
def sharded():
    """Makes models that FSDP2 has sharded, on one rank."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)

    def make():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
        return fully_shard(model, mesh=distributed.init_device_mesh("cpu", (1,)))

    yield make
    distributed.destroy_process_group()


class Own(torch.optim.SGD):
    """Has plain tensors of the shards' shape beside DTensors."""

    def step(self, closure=None):
        super().step()
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p].setdefault("own", torch.zeros_like(p.to_local()))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, ByName, Nested, Own])
def test_states_of_shards_are_shards_again_and_no_others(sharded, kind):
    models = [sharded() for _ in range(2)]
    first, second = (
        kind(m.parameters(), **({} if kind is torch.optim.AdamW else {"lr": 0.1, "momentum": 0.9})) for m in models
    )
    steps(models[0], first)
    state = through_a_file(rank_state.save(models[0], [first], None))
    rank_state.load(state, models[1], [second], None)
    kinds = [[type(v) for s in o.state.values() for v in s.values()] for o in (first, second)]
    assert kinds[0] == kinds[1]
    for model, optimizer in zip(models, (first, second), strict=True):
        steps(model, optimizer)
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(p.to_local(), q.to_local())


def test_a_state_that_is_sharded_as_no_parameter_is_refused(sharded):
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = next(model.parameters())
    optimizer.state[weight]["rows"] = weight.detach().tile(3, 1)
    with pytest.raises(ValueError, match="SGD has a state that is not sharded as any of its parameters"):
        rank_state.save(model, [optimizer], None)
