"""Steps that fail: nothing of the gradients is lost or counted twice, and the next step works."""

import itertools
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from harness import random_steps, replicas, residuals, set_collectives, together
from methods import EACH, FORGETFUL, METHODS, SMALL, WITHOUT_RESIDUAL
from models import compressed, gradients
from torch.utils._pytree import keystr, tree_leaves_with_path

from hvd_compress import IWP, MIPD, MP2, QSGD, SlimDP, TernGrad
from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.engine import exchange

WRITING = ["iwp-fp32", "topk", "fft", "fft-gather", "mipd-lloyd4", "mp2-guessing", "dgc", "qsgd", "terngrad"]


@pytest.mark.parametrize("name", WRITING)
def test_a_finished_bucket_is_undone_if_another_bucket_fails(name):
    world, ranks = replicas(1, METHODS[name], bucket_mb=0.08)
    (rank,) = ranks
    assert len(rank.compression.buckets) == 2
    random_steps(world, ranks, range(2))
    before = residuals(rank)
    start, calls = rank.collectives.start, []

    def broken(request, name):
        calls.append(name)
        if ".0.step" in name:
            raise ConnectionError("the network is gone")
        return start(request, name)

    rank.collectives.start = broken
    grads = gradients(rank.model, seed=9)
    given = [g.double().clone() for g in grads]
    with pytest.raises(ConnectionError):
        together(world, ranks, [grads])
    assert any(".1.step" in call for call in calls) and not rank.compression.engine.exchanges._running
    if name == "iwp-fp32":
        assert sum(".1.step" in call for call in calls) == 2, "indices and values"
    for number, (key, parameter) in enumerate(rank.model.named_parameters()):
        if key in [piece.name for piece in rank.compression.buckets[1].pieces]:
            assert not parameter.grad.any(), "averages that were undone"
            if name not in FORGETFUL:
                want = before[key] + given[number]
                torch.testing.assert_close(residuals(rank)[key], want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["iwp-fp32", "fft", "mipd", "topk"])
def test_a_step_that_cannot_begin_undoes_nothing(name):
    """A schedule raises an error for the second bucket. The step before was applied and must not be undone."""
    state = {"calls": 0, "fails": False}

    def density(step):
        state["calls"] += 1
        if state["fails"] and state["calls"] % 2 == 0:
            raise KeyError("no such rate")
        return 1 / 16

    world, (rank,) = replicas(1, METHODS[name], density=density, bucket_mb=0.08)
    random_steps(world, [rank], range(3))
    before, state["fails"] = residuals(rank), True
    p = rank.model.wide.weight
    p.grad = torch.ones_like(p)
    for _ in range(2):
        with pytest.raises(KeyError):
            rank.compression.compress(p.grad)
    rank.compression.reset()
    for key, held in residuals(rank).items():
        assert torch.equal(held, before[key])
    state["fails"] = False
    random_steps(world, [rank], [3])
    assert rank.compression.stats()["steps"] == 4


@pytest.mark.parametrize("name", ["iwp-fp32", "fft", "fft-gather", "mipd", "mp2-silent", "topk"])
def test_averages_without_a_gradient_to_write_them_to_stay_in_the_residual(name):
    """Each gradient is averaged in a step of its own: the other parameters of its bucket have none in that step."""
    world, (rank,) = replicas(1, METHODS[name], momentum=0.0)
    random_steps(world, [rank], range(2))
    named = [(n, p) for n, p in rank.model.named_parameters() if n in ("conv.weight", "wide.weight", "deep.weight")]
    before = residuals(rank)
    for step in range(3):
        for key, p in named:
            p.grad = torch.full_like(p, 0.5 + step)
            payload, ctx = rank.compression.compress(p.grad)
            first = (step, key) == (0, "conv.weight")
            with pytest.warns(UserWarning, match="no gradients arrived") if first else nullcontext():
                applied = rank.compression.decompress(payload, ctx)
            before[key] += 0.5 + step - applied.double()
            for other, held in residuals(rank).items():
                torch.testing.assert_close(held, before[other], rtol=0, atol=1e-4, msg=f"{other} in {key}'s {step}")


def test_a_gradient_that_was_not_accumulated_is_not_zeroed(monkeypatch):
    _, (rank,) = replicas(1, IWP, density=1 / 16)

    def broken(*_):
        raise MemoryError

    for work in rank.compression.works:
        monkeypatch.setattr(work, "accumulate", broken)
    parameters = [p for p in rank.model.parameters() if p.dim() > 1]
    for p in parameters:
        p.grad = torch.ones_like(p)
    with pytest.raises(MemoryError):
        for p in parameters:
            rank.compression.compress(p.grad)
    assert all(p.grad.all() for p in parameters) and not rank.compression.residual("wide.weight").any()


def test_gradients_of_a_step_that_failed_before_the_exchange_stay_in_the_residual():
    _, (rank,) = replicas(1, IWP, density=1 / 16)
    given, written = rank.model.wide.weight, rank.model.deep.weight
    for p in (given, written):
        p.grad = torch.ones_like(p)
        rank.compression.compress(p.grad)
    with torch.no_grad():
        written.grad.mul_(2.0)  # by somebody else: it is not what has arrived
    rank.compression.reset()
    assert not given.grad.any() and (rank.compression.residual("wide.weight") == 1.0).all()
    assert (written.grad == 2.0).all() and not rank.compression.residual("deep.weight").any()


def test_gradients_that_are_views_of_one_memory_all_stay_in_the_residual():
    """They have one version: when one becomes zero, it looks as if somebody had written to the others."""
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 64, bias=False) for _ in range(4)))
    _, (rank,) = replicas(1, IWP, density=1 / 16, model=model, bucket_mb=1 / 64)
    assert [len(bucket.pieces) for bucket in rank.compression.buckets] == [2, 2]
    ones = torch.ones(2, 64, 32)
    for p, grad in zip((rank.model[0].weight, rank.model[2].weight), ones, strict=True):
        p.grad = grad
        rank.compression.compress(p.grad)
    rank.compression.reset()
    assert not ones.any() and all((rank.compression.residual(f"{index}.weight") == 1.0).all() for index in (0, 2))


@pytest.mark.parametrize("size", [2, (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["quantized", "qsgd", "powersgd", "iwp-fp32", "fft", "mp2-silent"])
def test_a_gradient_that_another_one_is_added_to_in_flight_counts_once(name, size):
    """By a second backward pass, which Horovod refuses after the gradient was added; or clipped."""
    world, ranks = replicas(size, METHODS[name], **SMALL)
    random_steps(world, ranks, range(2))
    (rank,), before = ranks[:1], residuals(ranks[0])
    named = [(key, p) for key, p in rank.model.named_parameters() if compressed(p)]
    for _, p in named:
        p.grad = torch.ones_like(p)
        rank.compression.compress(p.grad)
    assert rank.compression.engine.exchanges.running  # the other ranks have not come
    for _, p in named:
        p.grad.add_(2.0)
    rank.compression.reset()
    for key, p in named:
        assert bool((p.grad == 2.0).all()), key
        if name not in FORGETFUL and size == 2:
            torch.testing.assert_close(residuals(rank)[key], before[key] + 1.0, rtol=0, atol=1e-5)


def test_the_next_step_works_after_a_failed_exchange():
    world, ranks = replicas(1, IWP, density=1 / 16)
    (rank,) = ranks
    start = rank.collectives.start

    def broken(request, name):
        raise ConnectionError("the network is gone")

    rank.collectives.start = broken
    rank.model.wide.weight.grad = torch.ones(47, 301)
    rank.model.conv.weight.grad = torch.ones(rank.model.conv.weight.shape)  # contiguous, and the weight is not
    rank.model.deep.weight.grad = torch.ones(64, 64)
    rank.compression.compress(rank.model.wide.weight.grad)
    rank.compression.compress(rank.model.conv.weight.grad)
    with pytest.raises(ConnectionError):
        rank.compression.compress(rank.model.deep.weight.grad)
    assert rank.compression.state_dict()["step"] == 0
    # The residual contains these gradients: if they were not zeroed, the next backward would count them twice.
    assert not any(p.grad.any() for p in rank.model.parameters() if p.grad is not None)
    assert rank.compression.residual("conv.weight").any()
    rank.collectives.start = start
    applied = random_steps(world, ranks, range(2))
    assert all(g.isfinite().all() for g in applied[0])
    assert rank.compression.stats()["steps"] == 2


def tensors_of(state):
    """The tensors in nested dicts, by path."""
    return {keystr(path): leaf for path, leaf in tree_leaves_with_path(state) if isinstance(leaf, torch.Tensor)}


SHARING = ["iwp-lanes4", "iwp-lloyd4", "mipd-lloyd4", "slimdp", "mp2", "mp2-guessing", "mp2-silent"]


@pytest.mark.parametrize("density", [None, 1.0])
@pytest.mark.parametrize("name", SHARING)
def test_a_failed_step_does_not_change_shared_state(name, density):
    """It may have failed on some ranks only, and shared state must stay equal on all."""
    build = METHODS[name] if density is None else partial(METHODS[name], density=density)
    world, (rank,) = replicas(1, build, bucket_mb=0.08)
    random_steps(world, [rank], range(7))
    compression = rank.compression

    def shared():
        return tensors_of(compression.state_dict()["shared"])

    before, held = shared(), residuals(rank)
    grads = gradients(rank.model, seed=77)
    given = [g.double().clone() for g in grads]
    finish = compression.engine.exchanges.finish
    compression.engine.exchanges.finish = lambda: (finish(), (_ for _ in ()).throw(ConnectionError))
    with pytest.raises(ConnectionError):
        rank.exchange(grads)
    torch.testing.assert_close(shared(), before, rtol=0, atol=1e-6)
    for (parameter, p), grad in zip(rank.model.named_parameters(), given, strict=True):
        if compressed(p):
            torch.testing.assert_close(residuals(rank)[parameter], held[parameter] + grad, rtol=0, atol=1e-4)


def test_a_state_can_be_loaded_in_the_middle_of_a_failed_step():
    """In elastic mode restore() comes before hvd.init()."""
    world, (rank,) = replicas(1, IWP, density=1 / 16)
    random_steps(world, [rank], range(2))
    state, held = rank.compression.state_dict(), residuals(rank)
    p = rank.model.wide.weight
    p.grad = torch.ones_like(p)
    _, ctx = rank.compression.compress(p.grad)
    rank.compression.load_state_dict(state)
    assert all(torch.equal(now, held[key]) for key, now in residuals(rank).items())
    assert not p.grad.any()
    with pytest.raises(RuntimeError, match=r"wide.weight: the step in which this gradient was compressed is gone"):
        rank.compression.decompress(torch.empty(0), ctx)
    random_steps(world, [rank], range(2, 4))


@pytest.mark.parametrize("build", [QSGD, TernGrad])
def test_gradients_of_a_failed_step_do_not_count_twice(build):
    world, ranks = replicas(1, build)
    ones = [torch.ones_like(p) for p in ranks[0].model.parameters()]
    parameter, number = ranks[0].model.wide.weight, 6
    parameter.grad = ones[number].clone()
    ranks[0].compression.compress(parameter.grad)
    ranks[0].compression.reset()
    applied = together(world, ranks, [ones])[0][number]
    assert float(applied.mean()) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(
    "build", [partial(MIPD, density=1.0), partial(SlimDP, density=1.0), partial(MP2, density=1 / 4, prediction=True)]
)
def test_a_repeated_step_number_causes_no_infinity(build):
    world, ranks = replicas(2, partial(build, values="fp32"))
    random_steps(world, ranks, [0])
    for rank in ranks:
        rank.compression.engine.step -= 1  # as after a failure
    random_steps(world, ranks, range(1, 4))
    state = ranks[0].compression.state_dict()
    assert all(bool(flat.isfinite().all()) for flat in tensors_of(state).values())


def test_an_exchange_goes_on_while_gradients_of_the_next_bucket_arrive(monkeypatch):
    monkeypatch.setattr(exchange, "POLL_INTERVAL", 0.0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(8)))
    _, (rank,) = replicas(1, partial(IWP, bucket_mb=4 * 64 * 64 * 4 / 2**20), model=model)
    start, started, arrived = rank.collectives.start, [], 0

    def slow(request, name):
        """Its result is there when the next gradient arrives."""
        handle, begin = start(request, name), arrived
        started.append((arrived, name))
        monkeypatch.setattr(handle, "done", lambda: arrived > begin)
        return handle

    rank.collectives.start = slow
    for p in reversed(list(rank.model.parameters())):
        arrived += 1
        p.grad = torch.ones_like(p)
        rank.compression.compress(p.grad)
    first = [at for at, name in started if name.startswith(f"{rank.compression.engine.exchanges.label}.0.")]
    assert first == [4, 5, 6], "the first bucket waits for the second to be full"


@pytest.mark.parametrize("name", EACH)
def test_whatever_a_step_has_exchanged_when_it_fails_the_state_is_as_before(name):
    """At each of its collectives, as it starts and as its result is due; and if its average is discarded."""
    _, ranks = replicas(2, METHODS[name], host="loop", **SMALL)
    random_steps(ranks[0].world, ranks, range(5))
    shared, held = [shared_state(rank) for rank in ranks], [residuals(rank) for rank in ranks]
    for at, waits in itertools.product(range(100), (False, True)):
        world = ThreadWorld(2, ordered=True)
        for rank in ranks:
            set_collectives(rank.compression, world.collectives(rank.rank))
            rank.compression.engine._generation = world
            fail(rank, at, waits)
        grads = [gradients(rank.model, seed=100 * at + rank.rank) for rank in ranks]
        given = [[g.double().clone() for g in grad] for grad in grads]
        try:
            together(world, ranks, grads)
            ended = True
        except ConnectionError:
            ended = False
        for rank, before, mine, grad in zip(ranks, shared, held, given, strict=True):
            if ended:
                rank.compression.discard_step()
            torch.testing.assert_close(shared_state(rank), before, rtol=0, atol=1e-6)
            for (key, p), g in zip(rank.model.named_parameters(), grad, strict=True):
                if compressed(p):
                    mine[key] += g if ended else g - p.grad.double()  # not of buckets that have not begun
            if name not in WITHOUT_RESIDUAL:
                torch.testing.assert_close(residuals(rank), mine, rtol=0, atol=1e-4)
        if ended:
            break
    assert ended and at


def shared_state(rank):
    return tensors_of(rank.compression.state_dict()["shared"])


def fail(rank, at, waits):
    """Lets the ``at``-th collective from now on fail: as it starts, or as its result is waited for."""
    start, count = rank.compression.engine.collectives.start, iter(range(1000))

    def broken(*_):
        raise ConnectionError

    def failing(request, name):
        if next(count) != at:
            return start(request, name)
        if not waits:
            broken()
        handle = start(request, name)
        handle.result = broken
        return handle

    rank.compression.engine.collectives.start = failing
