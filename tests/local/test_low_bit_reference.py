"""recipes.low_bit against its specification, hvd_compress/reference/low_bit.py: bitwise.

The specification adds the squares of a run, float64, in another order. A scale is rounded to bfloat16 afterwards: it
could differ only where both sums are on different sides of a rounding boundary, about once in 1e12 runs.
"""

import ast
import copy
import random
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from local_workers import sgd
from models import equal, gradients, mixed_model

from hvd_compress import recipes
from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.codecs.codebooks import codebook
from hvd_compress.engine.collectives import allgather, allreduce, alltoall
from hvd_compress.reference import low_bit

PERIOD, STEPS = 2, 9


class Group:
    """What the specification needs, of a rank in a thread."""

    def __init__(self, collectives):
        self.rank, self.size, self._collectives = collectives.rank, collectives.size, collectives

    def all_to_all(self, rows):
        return self._collectives.start(alltoall(rows.flatten()), "rows").result().view_as(rows)

    def all_gather(self, row):
        return self._collectives.start(allgather(row, "values"), "row").result().view(self.size, -1)

    def all_reduce(self, values):
        return self._collectives.start(allreduce(values, "dense_tensor"), "sum").result()


def package(model, optimizers, collectives, bucket, **options):
    optimizer, *averaged = optimizers
    options |= {"on_averaged_gradients": averaged}
    options |= {"bucket_mb": bucket * 4 / 2**20, "collectives": collectives, "restore_length": False}
    local = recipes.low_bit(model, optimizer, PERIOD, **options)
    works, weights = local.compression.engine.works, local._rounds._common.weights
    return local, optimizers, lambda: ([work.unsent() for work in works], [low_bit.flat(w.common) for w in weights])


def specification(model, optimizers, collectives, bucket, **options):
    optimizer, averaged = (*optimizers, None)[:2]
    options = {"bits": 2, "averaged": averaged, **options}
    local = low_bit.LowBit(model.parameters(), PERIOD, Group(collectives), bucket=bucket, **options)

    def kept():
        common = {p: low_bit.flat(p) if p in local.sums else c for p, c in local.common.items()}
        return [torch.cat([*b.values()]) for b in local.buckets], [*common.values()][::-1]

    return local, [optimizer], kept


def trained(make, ranks, model, bucket, scale, optimizers=lambda parameters: [sgd(parameters)], **options):
    """Trains one copy of ``model`` a rank. Returns, by rank, whether each step has exchanged; weights, residuals and
    common weights after every step, and after finish(); and what was sent in exchanges, by verb."""
    world = ThreadWorld(ranks, timeout=60, ordered=True)
    models = [copy.deepcopy(model) for _ in range(ranks)]

    def train(rank):
        model, collectives, sent = models[rank], world.collectives(rank), defaultdict(list)
        start = collectives.start

        def recorded(request, name):
            if request.category in ("values", "dense_tensor"):
                sent[request.verb].append(request.tensor.clone())
            return start(request, name)

        collectives.start, collectives.sums = recorded, lambda tensor: True
        local, stepped, kept = make(model, optimizers(model.parameters()), collectives, bucket, **options)
        exchanged, states = [], []

        def note():
            residuals, common = kept()
            states.append([t.detach().clone() for t in (*model.parameters(), *residuals, *common)])

        for step in range(STEPS):
            for p, grad in zip(model.parameters(), gradients(model, 100 * step + rank, scale), strict=True):
                p.grad = grad if p.requires_grad else None
            for optimizer in stepped:
                optimizer.step()
            exchanged.append(local.step())
            note()
        sent = dict(sent)
        collectives.start = start
        local.finish()
        note()
        return exchanged, states, sent

    return world.run(train)


def assert_equal(ranks, model, bucket=2**23, scale=1.0, **options):
    ours, theirs = (trained(make, ranks, model, bucket, scale, **options) for make in (package, specification))
    for (exchanged, states, sent), (also, others, received) in zip(ours, theirs, strict=True):
        assert exchanged == also == [step % PERIOD == PERIOD - 1 for step in range(STEPS)]
        assert all(equal(one, other) for one, other in zip(states, others, strict=True))
        assert all(t.isfinite().all() for t in states[-1])
        assert sent.keys() == received.keys() and all(equal(sent[verb], received[verb]) for verb in sent)
        assert not equal(states[0], states[PERIOD - 1])
    return ours[0]


def sgd_and_adamw(parameters):
    parameters = list(parameters)
    matrices, others = ([p for p in parameters if (p.dim() == 2) == one] for one in (True, False))
    return [sgd(matrices), torch.optim.AdamW(others, lr=0.01)]


@pytest.mark.parametrize("bucket", [20480, 2**23])
def test_averaged_gradients(bucket):
    """Also with finish() in the middle of a period, after the last step."""
    assert STEPS % PERIOD
    assert_equal(4, mixed_model(), bucket=bucket, optimizers=sgd_and_adamw)


@pytest.mark.alternate("ranks")
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_weights_residuals_and_messages_are_equal(bits, ranks):
    """Tensors that end within a run, channels_last, small ones in float16; all in one bucket."""
    _, _, sent = assert_equal(ranks, mixed_model(), bits=bits)
    assert len(sent["alltoall"]) == len(sent["allgather"]) == len(sent["allreduce"]) == STEPS // PERIOD
    assert sent["allreduce"][0].dtype == torch.float16 and sent["alltoall"][0].dtype == torch.uint8


@pytest.mark.parametrize(("bits", "mean_bits"), [(1, 2), (3, 1), (2, 8)])
def test_an_average_may_have_other_bits(bits, mean_bits):
    _, _, sent = assert_equal(3, mixed_model(), bucket=20480, bits=bits, mean_bits=mean_bits)
    for rows, row in zip(sent["alltoall"], sent["allgather"], strict=True):
        entries_in_bytes = (row.numel() - rows.numel() // 3) / (mean_bits - bits)
        assert entries_in_bytes > 0 and entries_in_bytes.is_integer()


@pytest.mark.parametrize("run", [8, 100, 10**6])
@pytest.mark.parametrize("bucket", [256, 20480, 2**23])
def test_any_buckets_and_runs(bucket, run):
    _, _, sent = assert_equal(3, mixed_model(), bucket=bucket, run=run)
    assert len(sent["alltoall"]) == {256: 3, 20480: 2, 2**23: 1}[bucket] * (STEPS // PERIOD)


def matrices(*shapes):
    generator = torch.Generator().manual_seed(0)
    return torch.nn.ParameterList(torch.randn(shape, generator=generator) for shape in shapes)


def frozen(model, number):
    list(model.parameters())[number].requires_grad_(False)
    return model


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 8))])
def test_any_shapes(seed):
    pick = random.Random(seed)
    shapes = [(pick.randint(1, 90), pick.randint(1, 90)) for _ in range(7)] + [(1024, 1), (31, 33), (1,), (5000,)]
    pick.shuffle(shapes)
    bits, bucket, run = pick.randint(1, 8), pick.choice([1024, 4096, 10000]), pick.randint(8, 700)
    assert_equal(pick.randint(2, 4), matrices(*shapes), bucket=bucket, bits=bits, run=run)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-12, 1e6, 1e18])
def test_any_magnitude(scale):
    """From zero, so that small differences are not rounded away; without float16."""
    model = matrices((64, 64), (40, 30))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert_equal(3, model, scale=scale)


@pytest.mark.parametrize(
    "model",
    [matrices((40, 40)), matrices((40,), (31, 33)), frozen(matrices((40, 40), (50, 50), (9,), (9,)), 1)],
    ids=["nothing small", "nothing large", "frozen"],
)
def test_any_kinds_of_parameters(model):
    assert_equal(2, model)


def test_a_rank_that_owns_no_entry():
    """1024 entries are 32 parts of 32."""
    _, _, sent = assert_equal(33, matrices((32, 32)))
    assert not sent["alltoall"][0].view(33, -1)[32].any()


@pytest.mark.parametrize("bits", range(1, 9))
def test_levels(bits):
    assert torch.equal(low_bit.lloyd_max(bits), codebook(bits)[0])


def test_it_can_be_copied():
    """It imports the standard library and torch only, and has 160 lines below the docstring."""
    tree = ast.parse(Path(low_bit.__file__).read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not any(node.level for node in found if isinstance(node, ast.ImportFrom))
    names = {alias.name for node in found if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in found if isinstance(node, ast.ImportFrom)}
    others = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    assert others == {"torch"} and not any(name.startswith("torch.distributed") for name in names)
    assert tree.body[-1].end_lineno - tree.body[1].lineno < 160
