"""Methods against their specifications in one file (hvd_compress/reference/iwp.py, demo.py): bitwise, on threads."""

import ast
import copy
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from models import equal, gradients, mixed_model

from hvd_compress import IWP, DeMo, average_gradients
from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.engine.collectives import allgather, allreduce
from hvd_compress.reference import demo, iwp


class Distributed:
    """Those functions of torch.distributed that a specification calls, of a rank in a thread."""

    def __init__(self, collectives):
        self.get_rank, self.get_world_size = lambda: collectives.rank, lambda: collectives.size
        self._collectives = collectives

    def all_reduce(self, tensor):
        tensor.copy_(self._collectives.start(allreduce(tensor), "sum").result())

    def all_gather(self, outputs, tensor):
        rows = self._collectives.start(allgather(tensor), "rows").result().view(len(outputs), -1)
        for output, row in zip(outputs, rows, strict=True):
            output.copy_(row)


def matrices(*shapes):
    generator = torch.Generator().manual_seed(0)
    return torch.nn.ParameterList(torch.randn(shape, generator=generator) for shape in shapes)


def any_shapes(seed):
    """Tensors that end within a block, just above and below 1024 entries, and of one dimension."""
    pick = random.Random(seed)
    shapes = [(pick.randint(1, 90), pick.randint(1, 90)) for _ in range(5)] + [(1024, 1), (31, 33), (1,), (5000,)]
    pick.shuffle(shapes)
    return matrices(*shapes)


def trained(make, ranks, model, steps, scale):
    """Trains one copy of ``model`` a rank. ``make`` returns two functions: one averages the gradients, one returns the
    state. Returns by rank: gradients, weights and state after every step."""
    world = ThreadWorld(ranks, timeout=60, ordered=True, in_turn=True)
    models = [copy.deepcopy(model) for _ in range(ranks)]

    def train(rank):
        model = models[rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.1)
        average, state = make(model, world.collectives(rank))
        states = []
        for step in range(steps):
            for p, grad in zip(model.parameters(), gradients(model, 100 * step + rank, scale), strict=True):
                p.grad = grad if p.requires_grad else None
            average()
            grads = [p.grad.clone() for p in model.parameters() if p.requires_grad]
            optimizer.step()
            states.append([t.detach().clone() for t in (*grads, *model.parameters(), *state())])
        return states

    return world.run(train)


@dataclass(frozen=True)
class Copy:
    """A method of the package, its specification, and the state of both in the same order: of one bucket's work, and of
    all of a specification's."""

    method: Callable[..., Any]
    module: ModuleType
    specification: Callable[..., Any]
    of_work: Callable[[Any], Any]
    of_copy: Callable[[Any], Any]

    def assert_same(self, model, ranks=3, steps=6, scale=1.0, **options):
        def package(model, collectives):
            compression = self.method(model, collectives=collectives, **options)
            assert all(len(bucket.pieces) == 1 for bucket in compression.buckets)
            return lambda: average_gradients(compression), lambda: [
                t for w in compression.works for t in self.of_work(w)
            ]

        def copied(model, collectives):
            averaging = self.specification(model.parameters(), Distributed(collectives), **options)
            return averaging.average, lambda: self.of_copy(averaging)

        ours, theirs = (trained(make, ranks, model, steps, scale) for make in (package, copied))
        for states, others in zip(ours, theirs, strict=True):
            for step, (one, other) in enumerate(zip(states, others, strict=True)):
                assert equal(one, [t.view_as(o) for t, o in zip(other, one, strict=True)]), step
            assert all(t.isfinite().all() for t in states[-1]) and not equal(states[0], states[1])


COPIES = {
    "iwp": Copy(
        partial(IWP, values="fp16", explore=0, bucket_mb=1e-3),
        iwp,
        iwp.IWP,
        lambda work: (work.bucket.residual, work.parts["block_means"].unsent),
        lambda copied: [t for residual, unsent, _ in copied.states.values() for t in (residual, unsent)],
    ),
    "demo": Copy(
        partial(DeMo, values="fp16", bucket_mb=1e-3),
        demo,
        demo.DeMo,
        lambda work: [work.bucket.residual],
        lambda copied: copied.momenta.values(),
    ),
}
each = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())


def more(*values):
    """Values of a parameter that need --all."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow) for value in values
    ]


@each
@pytest.mark.parametrize(("ranks", "seed"), [(2, 0), (3, 1), (5, 3), *more((3, 0), (3, 2))])
def test_gradients_weights_and_states_are_equal(copied, ranks, seed):
    """Tensors that end within a block, channels_last, small ones."""
    copied.assert_same(mixed_model(), ranks, seed=seed)


@each
@pytest.mark.parametrize("seed", [0, 1, *more(2, 3)])
def test_any_shapes(copied, seed):
    copied.assert_same(any_shapes(seed), seed=seed)


@each
@pytest.mark.parametrize("density", [1 / 1024, 1 / 7, 1 / 2])
def test_any_density(copied, density):
    copied.assert_same(any_shapes(9), density=density)


@pytest.mark.parametrize(
    ("name", "scale"), [("iwp", 0.0), *((name, scale) for name in COPIES for scale in (1e-6, 100.0))]
)
def test_any_magnitude(name, scale):
    COPIES[name].assert_same(matrices((64, 64), (40, 30)), scale=scale)


def test_mean_weights_are_measured_again():
    COPIES["iwp"].assert_same(matrices((40, 40), (33, 40), (9,)), ranks=2, steps=103)


def test_other_momenta():
    COPIES["demo"].assert_same(mixed_model(), decay=0.9, dense_momentum=0.5)


@each
def test_it_can_be_copied(copied):
    """It imports the standard library and torch only, and has at most 120 lines."""
    source = Path(copied.module.__file__).read_text()
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not any(node.level for node in found if isinstance(node, ast.ImportFrom))
    names = {alias.name for node in found if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in found if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} - sys.stdlib_module_names == {"torch"}
    assert len(source.splitlines()) <= 120
