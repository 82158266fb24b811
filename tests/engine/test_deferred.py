"""Updates of the residual that are deferred to the next step."""

from functools import partial

import pytest
import torch
from harness import gradients, random_steps, replicas, residuals, together
from methods import METHODS, SMALL, fitting

from hvd_compress.engine.deferred import NOT_DEFERRED


@pytest.mark.parametrize("momentum", [pytest.param(0.0, marks=pytest.mark.slow), 0.9])
@pytest.mark.parametrize("name", METHODS)
def test_reading_the_residual_changes_nothing(name, momentum):
    """residual() and stats() show the updated residual, also in the middle of a step, and Bucket.residual applies the
    deferred update early: both leave the results of later steps unchanged."""
    method, results = partial(METHODS[name], **SMALL), []
    for read in (None, _read, _apply):
        world, ranks = replicas(2, method, **fitting(method, {"momentum": momentum}))
        for rank in ranks if read else ():
            rank.compression.compress = partial(_compress_after, read, rank, rank.compression.compress)
        applied = random_steps(world, ranks, range(5))
        states = [flat for bucket in ranks[0].compression.buckets for flat in (bucket.residual, *bucket.state.values())]
        results.append([*applied[0], *states])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def _compress_after(read, rank, compress, grad):
    read(rank)
    return compress(grad)


def _read(rank):
    norm = rank.compression.stats()["residual_norm"]
    held = torch.stack([residual.norm() for residual in residuals(rank).values()]).norm()
    assert norm == pytest.approx(held.item(), rel=1e-3)


def _apply(rank):
    for bucket in rank.compression.buckets:
        before = {segment: bucket.residual_of(segment).clone() for segment in bucket.segments}
        assert all(torch.equal(segment.of(bucket.residual), one) for segment, one in before.items())


DEFERRING = ["iwp", "iwp-no-means", "fft", "fft-gather", "demo"]


@pytest.mark.parametrize("name", DEFERRING)
def test_a_gradient_applies_the_deferred_update_of_its_own_segment_only(name):
    world, ranks = replicas(1, METHODS[name], **SMALL)
    random_steps(world, ranks, range(2))
    (rank,) = ranks
    bucket = next(bucket for bucket in rank.compression.buckets if len(bucket.segments) > 1)
    before = bucket.state["residual"].clone()
    bucket.deferred.apply = None  # nothing may apply the rest
    first, second = bucket.segments[0], bucket.segments[1]
    first.parameter.grad = torch.zeros_like(first.parameter)
    rank.compression.compress(first.parameter.grad)
    assert bucket.deferred.arguments(0) is NOT_DEFERRED and bucket.deferred.arguments(1) is not NOT_DEFERRED
    assert not torch.equal(first.of(bucket.state["residual"]), first.of(before))
    assert torch.equal(second.of(bucket.state["residual"]), second.of(before))
    with pytest.raises(TypeError):
        bucket.apply_deferred()


@pytest.mark.parametrize("name", DEFERRING)
def test_an_exchange_starts_without_a_deferred_update(name):
    """It writes to the memory that the last update holds."""
    world, (rank,) = replicas(1, METHODS[name], **SMALL)
    random_steps(world, [rank], range(2))
    exchange, seen = rank.compression.exchange, []

    def spy(bucket):
        seen.append(bucket.deferred)
        yield from exchange(bucket)

    rank.compression.exchange = spy
    random_steps(world, [rank], range(2, 4))
    assert seen == [None] * 4


@pytest.mark.parametrize("name", DEFERRING)
def test_no_entry_is_lost_over_steps_with_deferred_updates(name):
    world, ranks = replicas(3, METHODS[name], **SMALL)
    given, applied = (torch.zeros(47, 301, dtype=torch.float64) for _ in range(2))
    for step in range(6):
        grads = [gradients(r.model, seed=100 * step + r.rank) for r in ranks]
        number = [key for key, _ in ranks[0].model.named_parameters()].index("wide.weight")
        given += sum(grad[number].double() for grad in grads)
        applied += together(world, ranks, grads, shuffle=step)[0][number].double()
    held = sum(residuals(rank)["wide.weight"] for rank in ranks)
    torch.testing.assert_close(3 * applied + held, given, rtol=0, atol=1e-3)
