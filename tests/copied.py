"""Methods against their specifications in one file (hvd_compress/reference/iwp.py, demo.py): bitwise, on threads."""

import ast
import copy
import random
import sys
from pathlib import Path

import torch
from models import equal, gradients

from hvd_compress import average_gradients
from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.engine.collectives import allgather, allreduce


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


def assert_equal(method, specification, kept, ranks, model, steps=6, scale=1.0):
    """``kept``: returns the state of one bucket's work, and of all of a specification's, in the same order."""

    def package(model, collectives):
        compression = method(model, collectives=collectives)
        assert all(len(bucket.pieces) == 1 for bucket in compression.buckets)
        return lambda: average_gradients(compression), lambda: [t for w in compression.works for t in kept[0](w)]

    def copied(model, collectives):
        averaging = specification(model.parameters(), Distributed(collectives))
        return averaging.average, lambda: kept[1](averaging)

    ours, theirs = (trained(make, ranks, model, steps, scale) for make in (package, copied))
    for states, others in zip(ours, theirs, strict=True):
        for step, (one, other) in enumerate(zip(states, others, strict=True)):
            assert equal(one, [t.view_as(o) for t, o in zip(other, one, strict=True)]), step
        assert all(t.isfinite().all() for t in states[-1]) and not equal(states[0], states[1])


def assert_copyable(module):
    """It imports the standard library and torch only, and has at most 120 lines."""
    source = Path(module.__file__).read_text()
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not any(node.level for node in found if isinstance(node, ast.ImportFrom))
    names = {alias.name for node in found if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in found if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} - sys.stdlib_module_names == {"torch"}
    assert len(source.splitlines()) <= 120
