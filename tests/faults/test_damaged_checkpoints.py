"""Damaged checkpoints, generated for every method: each is refused with the path of the item, and nothing changes.

A damage is made from a saved state by walking it: a key is missing or added, a dict is something else, a leaf has
another type, a tensor another dtype or shape, a NaN or an infinity, a number is out of range.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from harness import Rank, random_steps, replicas
from methods import METHODS, SMALL, TRAINED, fitting
from torch import Tensor

from hvd_compress import LocalSteps, SlimDP
from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.engine.state import same

MISSING = object()
STEPS = 4


def with_local_steps(named_parameters: Any, **options: Any) -> SlimDP:
    """A compressor that serves local steps, which are in its state."""
    named = list(named_parameters)
    compression = SlimDP(named, density=1 / 8, **options)
    compression.local = LocalSteps(compression, torch.optim.SGD([p for _, p in named], lr=0.1), 2, outer_momentum=0.5)
    return compression


class Damage(NamedTuple):
    kind: str
    path: tuple[str, ...]
    state: Any

    @property
    def reported(self) -> str:
        """The path that the error must have: items that are checked as one are reported as one."""
        for depth, key in enumerate(self.path):
            if key in ("owner", "density"):
                return ".".join(self.path[: depth + 1])
            if key in ("made_with", "parameters"):
                return ".".join(self.path[: depth + 2])
        return ".".join(self.path)


def replaced(state: Any, path: tuple[str, ...], value: Any) -> Any:
    """A copy of ``state`` with another value at ``path``."""
    if not path:
        return value
    copy = dict(state)
    if value is MISSING and len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = replaced(copy.get(path[0]), path[1:], value)
    return copy


def with_entry(tensor: Tensor, value: float) -> Tensor:
    """The tensor with another last entry."""
    copy = tensor.clone()
    copy[(-1,) * copy.dim()] = value
    return copy


def of_tensor(path: tuple[str, ...], tensor: Tensor) -> Iterator[tuple[str, Any]]:
    yield "a list for a tensor", tensor.tolist()
    yield "another dtype", tensor.to(torch.int32 if tensor.is_floating_point() else torch.float32)
    yield "another float", tensor.to(torch.float16)
    yield "another shape", tensor[None]
    if tensor.dim():
        yield "a tensor cut off", tensor[:-1] if len(tensor) else torch.zeros(1)
    # SlimDP's anchors are copies of the parameters, which may be anything.
    if tensor.numel() and tensor.is_floating_point() and not {"anchor", "anchors"} & set(path):
        yield "NaN", with_entry(tensor, math.nan)
        yield "infinity", with_entry(tensor, math.inf)
    if tensor.numel() and {"channels", "floors", "last_sent", "squares", "chance"} & set(path):
        yield "out of range", with_entry(tensor, -7)


def of_number(path: tuple[str, ...], number: Any) -> Iterator[tuple[str, Any]]:
    yield "a string for a number", str(number)
    yield "None for a number", None
    yield "a tensor for a number", torch.tensor(number)
    if type(number) is bool:
        yield "a number for a bool", int(number)
        return
    yield "a bool for a number", True
    if type(number) is int:
        yield "a float for an int", number + 0.5
        yield "a float for an int", float(number)
    else:
        yield "NaN", math.nan
        yield "infinity", math.inf
    if not path[-1].startswith("digest"):
        yield "a negative number", -5


def damages(state: Any, whole: Any, path: tuple[str, ...] = ()) -> Iterator[Damage]:
    """All damages of the item ``state`` at ``path`` of ``whole``."""

    def damage(kind: str, value: Any, *below: str) -> Damage:
        return Damage(kind, (*path, *below), replaced(whole, (*path, *below), value))

    if isinstance(state, dict):
        yield damage("something else for a dict", list(state))
        yield damage("an unknown key", 0, "unknown")
        for key, item in state.items():
            yield damage("a missing key", MISSING, key)
            yield from damages(item, whole, (*path, key))
        return
    yield damage("another type", object())
    if isinstance(state, Tensor):
        found = of_tensor(path, state)
    elif isinstance(state, int | float):
        found = of_number(path, state)
    else:
        found = iter([("another value", f"other than {state}")])
    for kind, value in found:
        yield damage(kind, value)


def trained(build: Any) -> tuple[ThreadWorld, list[Rank]]:
    """Two ranks after a few steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 40, bias=False))
    world, ranks = replicas(2, partial(build, **SMALL), model=model)
    go_on(world, ranks, range(STEPS))
    return world, ranks


def go_on(world: ThreadWorld, ranks: list[Rank], steps: range) -> list[Tensor]:
    """More steps: the first rank's averages, or its parameters with local steps."""
    if not ranks[0].compression.takes_local_steps:
        return random_steps(world, ranks, steps)[0]

    def body(i: int) -> None:
        rounds = ranks[i].compression.engine.driver
        for step in steps:
            for number, p in enumerate(ranks[i].model.parameters()):
                generator = torch.Generator().manual_seed(100 * step + 10 * i + number)
                p.grad = torch.randn(p.shape, generator=generator)
            for optimizer in rounds._optimizers._all:
                optimizer.step()
            rounds.count()

    world.run(body)
    return list(ranks[0].model.parameters())


def check(build: Any, share: int = 1) -> None:
    """Every ``share``-th damage of a kind is refused and changes nothing; afterwards training goes on as without."""
    world, ranks = trained(build)
    compression = ranks[0].compression
    earlier = compression.state_dict()
    # A later step: what a refused state has loaded would be seen.
    go_on(world, ranks, range(STEPS, STEPS + 1))
    before = compression.state_dict()
    seen: dict[str, int] = {}
    for damage in damages(earlier, earlier):
        seen[damage.kind] = seen.get(damage.kind, -1) + 1
        if seen[damage.kind] % share:
            continue
        with pytest.raises(ValueError) as raised:
            compression.load_state_dict(damage.state)
            pytest.fail(f"{damage.kind} at {damage.reported} was accepted")
        assert damage.reported in str(raised.value), (damage.kind, damage.reported, str(raised.value))
        assert same(before, compression.state_dict()), (damage.kind, damage.reported)
    assert len(seen) > 12, seen
    world_without, without = trained(build)
    go_on(world_without, without, range(STEPS, STEPS + 1))
    steps = range(STEPS + 1, STEPS + 3)
    for one, other in zip(go_on(world, ranks, steps), go_on(world_without, without, steps), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", [*TRAINED, "local-steps"])
def test_damaged_states_are_refused(name):
    """One of each class, a fifth of the damages; test_all_damaged_states_are_refused has all."""
    check({**TRAINED, "local-steps": with_local_steps}[name], share=5)


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", [*METHODS, "local-steps"])
def test_all_damaged_states_are_refused(name, momentum):
    build = {**METHODS, "local-steps": with_local_steps}[name]
    if name != "local-steps":
        build = partial(build, **fitting(build, {"momentum": momentum}))
    check(build)
