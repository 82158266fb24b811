"""Damaged checkpoints, generated for every method: each is refused with the path of the item, and nothing changes."""

import itertools
import math
from collections import Counter
from functools import partial

import pytest
import torch
from harness import random_steps, replicas
from local_workers import Worker
from methods import METHODS, SMALL, TRAINED, fitting
from torch import Tensor

from hvd_compress import SlimDP, reshard
from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.engine.state import same

MISSING = object()
STEPS = 4


def wrong_values(path, value):
    """(what is wrong, a value in place of this one) for one item of a state."""
    yield "another type", object()
    if path:
        yield "a missing key", MISSING
    if isinstance(value, dict):
        yield "something else for a dict", list(value)
        yield "an unknown key", {**value, "unknown": 0}
    elif isinstance(value, Tensor):
        yield "a list for a tensor", value.tolist()
        yield "another dtype", value.to(torch.int32 if value.is_floating_point() else torch.float32)
        yield "another float", value.to(torch.float16)
        yield "another shape", value[None]
        if value.dim():
            yield "a tensor cut off", value[:-1] if len(value) else torch.zeros(1)
        entries = [("NaN", math.nan), ("infinity", math.inf)] if value.is_floating_point() else []
        if {"channels", "floors", "last_sent", "squares", "chance"} & set(path):
            entries.append(("out of range", -7))
        for what, entry in entries if value.numel() else ():
            yield what, torch.cat([value.flatten()[:-1], value.new_full((1,), entry)]).view(value.shape)
    elif isinstance(value, int | float):
        yield from (("a string for a number", str(value)), ("None for a number", None))
        yield "a tensor for a number", torch.tensor(value)
        yield from (("a bool for a number", True), ("a negative number", -5)) if type(value) is not bool else ()
        if type(value) is float:
            yield from (("NaN", math.nan), ("infinity", math.inf))
        else:
            yield "a number of another type", int(value) if type(value) is bool else float(value)
    elif value is not None:
        yield "another value", f"other than {value}"


def damages(state, path=()):
    """(what is wrong, path, damaged state) for all items of a state."""
    item = state
    for key in path:
        item = item[key]
    for what, value in wrong_values(path, item):
        yield what, path, replaced(state, path, value)
    for key in item if isinstance(item, dict) else ():
        yield from damages(state, (*path, key))


def replaced(state, path, value):
    """A copy of ``state`` with another value at ``path``."""
    if not path:
        return value
    rest = {key: item for key, item in state.items() if key != path[0]}
    inner = replaced(state[path[0]], path[1:], value)
    return rest if inner is MISSING else {**rest, path[0]: inner}


def reported(path):
    """The path that the error must have: items that are checked as one are reported as one."""
    for depth, key in enumerate(path):
        if key == "owner":
            return ".".join(path[: depth + 1])
        if key in ("made_with", "parameters"):
            return ".".join(path[: depth + 2])
    return ".".join(path)


class Trained:
    """Two ranks, after a few steps of their own or with local steps."""

    def __init__(self, build, local):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 40, bias=False))
        if local:
            self.world = ThreadWorld(2)
            options = dict(build=build, model=model, period=2, outer_momentum=0.5)
            self.ranks = [Worker(self.world, rank, **options) for rank in range(2)]
        else:
            self.world, self.ranks = replicas(2, partial(build, **SMALL), model=model)
        self.local = local
        self.go_on(range(STEPS))

    def go_on(self, steps):
        """Returns what has become of the first rank: the last averages, or with local steps its parameters."""
        if not self.local:
            return random_steps(self.world, self.ranks, steps)[0]
        self.world.run(lambda i: self.ranks[i].train(len(steps), first=steps[0]))
        return self.ranks[0].weights()


def check(build, share=1, local=False):
    """Every ``share``-th damage of a kind is refused and changes nothing; afterwards training goes on as without."""
    damaged, without = Trained(build, local), Trained(build, local)
    compression = damaged.ranks[0].compression
    states = damaged.world.run(lambda i: damaged.ranks[i].compression.state_dict())
    given = [states[0]] if local else [states[0], reshard(states)]
    # A later step: what a refused state has loaded would be seen.
    for trained in (damaged, without):
        trained.go_on(range(STEPS, STEPS + 1))
    before, seen = compression.state_dict(), Counter()
    for what, path, state in itertools.chain(*map(damages, given)):
        seen[what] += 1
        if seen[what] % share:
            continue
        with pytest.raises(ValueError) as raised:
            compression.load_state_dict(state)
            pytest.fail(f"{what} at {reported(path)} was accepted")
        assert reported(path) in str(raised.value), (what, path, str(raised.value))
        assert same(before, compression.state_dict()), (what, path)
    assert len(seen) > 12, seen
    steps = range(STEPS + 1, STEPS + 3)
    for one, other in zip(damaged.go_on(steps), without.go_on(steps), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", TRAINED)
def test_damaged_states_are_refused(name):
    """One of each class, a fifth of the damages; test_all_damaged_states_are_refused has all."""
    check(TRAINED[name], share=5)


@pytest.mark.parametrize("share", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_damaged_states_of_local_steps_are_refused(share):
    check(partial(SlimDP, density=1 / 8), share, local=True)


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", METHODS)
def test_all_damaged_states_are_refused(name, momentum):
    check(partial(METHODS[name], **fitting(METHODS[name], {"momentum": momentum})))
