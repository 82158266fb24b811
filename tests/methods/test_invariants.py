"""What holds for every method under either host, with 1 to 8 ranks in one process."""

import itertools
from functools import partial

import pytest
import torch
from harness import (
    HOSTS,
    NODES,
    on_hosts_in_turn,
    random_steps,
    replicas,
    residuals,
    together,
    toy_model,
    train,
    without_loss,
)
from methods import EXACT, FORGETFUL, METHODS, SMALL, TRAINED, WHOLE, WITHOUT_RESIDUAL, unless_kind
from models import compressed, equal, gradients, mixed_model

from hvd_compress import NoCompression
from hvd_compress.carriers.threads import ThreadCollectives


@pytest.fixture
def method(request):
    return partial(METHODS[request.param], **SMALL)


EXACT_IN_SUM = [name for name in METHODS if name not in FORGETFUL]


def slow(size):
    return pytest.param(size, marks=pytest.mark.slow)


def of_every_method(*sizes, nodes=NODES, names=METHODS, all_at=None):
    """A decorator: of each method, each size; and nodes. Without --all, of one method of each kind, each with one of
    the nodes; and of all methods at the size ``all_at``."""
    flat = [size if isinstance(size, tuple) else pytest.param(size, id=str(size)) for size in sizes]

    def marks(number, name, size):
        if size in nodes and nodes[number % len(nodes)] is not size:
            return (pytest.mark.slow,)
        return () if size.values == (all_at,) else unless_kind(name)

    return pytest.mark.parametrize(
        ("method", "size"),
        [
            pytest.param(
                name,
                *size.values,
                marks=(*size.marks, *marks(number, name, size)),
                id=f"{name}-{size.id or size.values[0]}",
            )
            for number, name in enumerate(names)
            for size in (*flat, *nodes)
        ],
        indirect=["method"],
    )


@on_hosts_in_turn
@of_every_method(1, 3, *map(slow, (2, 5, 8)), names=EXACT_IN_SUM, all_at=3)
def test_no_entry_is_lost_and_all_ranks_get_the_same_bits(method, size, host):
    world, ranks = replicas(4 if (host, size) == ("ddp", 8) else size, method, host=host)
    assert len(ranks[0].compression.buckets) > 1 or method.func is NoCompression
    for step in range(5):
        grads = [gradients(r.model, seed=100 * step + r.rank) for r in ranks]
        if step == 1:  # a parameter is unused on one rank
            grads[-1][4] = None
        without_loss(world, ranks, grads, shuffle=step)


@on_hosts_in_turn
@pytest.mark.parametrize("size", [1, 4, NODES[1], *map(slow, (2, 7, (2, 2)))], ids=str)
@pytest.mark.parametrize("exact", EXACT.values(), ids=EXACT.keys())
def test_density_one_is_dense_training(exact, size, host):
    world, ranks = replicas(size, exact, host=host, **SMALL)
    for step in range(3):
        grads = [gradients(r.model, seed=10 * step + r.rank) for r in ranks]
        mean = [torch.stack([g[i] for g in grads]).mean(0) for i in range(len(grads[0]))]
        for rank in together(world, ranks, grads, shuffle=step):
            torch.testing.assert_close(rank, mean, rtol=1e-6, atol=1e-6)


@on_hosts_in_turn
@of_every_method(3, *map(slow, (2, 4)))
def test_the_order_of_gradients_does_not_change_a_bit(method, size, host):
    """Horovod: another order on every rank. DDP: another order and other buckets in every step."""
    results = []
    for order in (1, 2):
        world, ranks = replicas(size, method, host=host)
        results.append(random_steps(world, ranks, range(3), order=order * 100)[0])
    assert equal(*results)


@of_every_method(3, slow(2))
def test_both_hosts_give_the_same_bits(method, size):
    """In threads all sums are in the order of the ranks, so this holds for floats, too."""
    results = []
    for host in HOSTS:
        world, ranks = replicas(size, method, host=host)
        results.append([*random_steps(world, ranks, range(3))[0], *residuals(ranks[-1]).values()])
    assert equal(*results)


@pytest.mark.parametrize(
    ("host", "steps"),
    [
        ("horovod", 60),  # two stages of the warm-up end
        *(pytest.param(*other, marks=pytest.mark.slow) for other in itertools.product(("horovod", "ddp"), (150, 1000))),
    ],
)
@pytest.mark.parametrize("trained", TRAINED.values(), ids=TRAINED.keys())
@pytest.mark.alternate("nodes")
@pytest.mark.parametrize("nodes", [None, (2, 2)], ids=["flat", "2x2"])
def test_replicas_stay_bit_equal(trained, steps, host, nodes):
    """DDP in the short run: faults/test_many_steps.py."""
    world, ranks = replicas(nodes or (3 if steps < 1000 else 4), trained, model=toy_model(), host=host)
    losses = train(world, ranks, steps)
    # Without momentum, 1000 steps of dense training end at 0.323, too.
    best = 0.1 if trained.keywords.get("momentum") else 0.33
    assert max(losses) < (best if steps == 1000 else 0.5), "training must have worked"
    for one, other in itertools.pairwise(ranks):
        assert equal(one.model.parameters(), other.model.parameters())


@on_hosts_in_turn
@of_every_method(2, nodes=NODES[:1])
def test_payload_shapes_are_constant(method, size, host, monkeypatch):
    """A changing shape would miss Horovod's response cache on every rank. (DDP's uncompressed gradients are exchanged
    bucket by bucket, and Horovod averages its own.)"""
    world, ranks = replicas(size, method, host=host)
    seen: dict[str, set[tuple[torch.Size, torch.dtype]]] = {}
    start = ThreadCollectives.start

    def spy(collectives, request, name):
        if name.startswith("hvd_compress") and ".dense." not in name and collectives._number == 0:
            seen.setdefault(name, set()).add((request.verb, request.tensor.shape, request.tensor.dtype))
        return start(collectives, request, name)

    monkeypatch.setattr(ThreadCollectives, "start", spy)
    random_steps(world, ranks, range(6))
    assert seen and all(len(shapes) == 1 for shapes in seen.values()), seen


@on_hosts_in_turn
@of_every_method(3, names=EXACT_IN_SUM)
def test_an_infinite_gradient_reaches_every_rank_and_damages_no_residual(method, size, host):
    """In a node of several ranks, the other ranks' gradients of the same entry are lost with it."""
    world, ranks = replicas(size, method, host=host)
    per_node = ranks[0].compression.engine.nodes.ranks
    together(world, ranks, [gradients(r.model, seed=r.rank) for r in ranks], shuffle=1)
    before = [residuals(r) for r in ranks]
    grads = [gradients(r.model, seed=50 + r.rank) for r in ranks]
    grads[1][6].view(-1)[5] = float("inf")
    given = [[g.double().clone() for g in grad] for grad in grads]
    applied = together(world, ranks, grads, shuffle=2)
    for rank in applied:
        assert not all(g.isfinite().all() for g in rank), "the infinity did not reach a rank"
    after = [residuals(r) for r in ranks]
    named = [] if method.func is NoCompression else ranks[0].model.named_parameters()
    for number, (name, _) in enumerate(named):
        if applied[0][number].isfinite().all():
            continue
        for i in range(0, len(ranks), per_node):  # what a node holds, and its mean gradient
            node = range(i, i + per_node)
            held = [sum(state[name] for state in states[i : i + per_node]) for states in (before, after)]
            mean = (sum(given[j][number] for j in node) / per_node).nan_to_num(posinf=0.0)
            torch.testing.assert_close(held[1], held[0] + mean, rtol=0, atol=1e-5)
    # The next step with finite gradients has finite results.
    grads = [gradients(r.model, seed=80 + r.rank) for r in ranks]
    applied = together(world, ranks, grads, shuffle=3)
    assert all(g.isfinite().all() for rank in applied for g in rank)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", TRAINED)
def test_uncompressed_parameters_are_averaged_exactly(name, host):
    # Without block means, which change every entry.
    world, ranks = replicas(2, METHODS["iwp-no-means" if name == "iwp" else name], host=host)
    grads = [gradients(r.model, seed=r.rank) for r in ranks]
    mean = [torch.stack([g[i] for g in grads]).mean(0) for i in range(len(grads[0]))]
    applied = together(world, ranks, grads)
    sparse = name not in ("fft", "demo", "powersgd", "quantized", *WITHOUT_RESIDUAL)
    for (parameter, p), got, want in zip(mixed_model().named_parameters(), applied[0], mean, strict=True):
        if not compressed(p) or name in WHOLE:
            torch.testing.assert_close(got, want)
        elif sparse:
            assert 0 < (got != 0).sum() < got.numel() / 7, parameter


@on_hosts_in_turn
@pytest.mark.alternate("dtype")
@pytest.mark.parametrize("size", [2, (2, 2)], ids=["2", "2x2"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", TRAINED)
def test_16_bit_parameters(name, dtype, size, host):
    """Residuals are float32: what is applied and what is held add up to what was given, up to the rounding of what is
    applied."""
    world, ranks = replicas(size, METHODS[name], model=mixed_model().to(dtype), host=host, **SMALL)
    per_node = ranks[0].compression.engine.nodes.ranks
    total, applied = [[torch.zeros(p.shape, dtype=torch.float64) for p in ranks[0].model.parameters()] for _ in "ab"]
    for step in range(4):
        grads = [gradients(r.model, seed=10 * step + r.rank) for r in ranks]
        for grad in grads:
            for t, g in zip(total, grad, strict=True):
                t += g.double()
        results = together(world, ranks, grads, shuffle=step)
        assert all(equal(results[0], other) for other in results[1:])
        for a, g in zip(applied, results[0], strict=True):
            assert g.dtype == dtype and g.isfinite().all()
            a += g.double()
    for number, (key, _) in enumerate(ranks[0].model.named_parameters()):
        held = per_node * sum(residuals(r)[key] for r in ranks)
        if name not in FORGETFUL:
            got = world.size * applied[number] + held
            torch.testing.assert_close(got, total[number], rtol=0.02, atol=0.3 * per_node)
