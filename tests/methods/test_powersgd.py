"""PowerSGD against an independent implementation of its paper."""

import pytest
import torch
from harness import random_steps, replicas, residuals, together
from models import equal, gradients

from hvd_compress import PowerSGD


def linear(rows=48, columns=64):
    torch.manual_seed(0)
    return torch.nn.Linear(columns, rows, bias=False)


def span(matrix):
    """The projection on the column space: independent of the basis."""
    return matrix @ torch.linalg.pinv(matrix)


@pytest.mark.parametrize("feedback", [True, False])
def test_powersgd_follows_its_paper(feedback):
    world, ranks = replicas(3, PowerSGD, model=linear(), rank=3, values="fp32", error_feedback=feedback)
    q = ranks[0].compression.state_dict()["shared"]["buckets"]["0"]["q"]["weight"].double()
    errors = [torch.zeros(48, 64, dtype=torch.float64) for _ in ranks]
    for step in range(6):
        grads = [gradients(r.model, seed=10 * step + r.rank) for r in ranks]
        matrices = [g[0].double() + e for g, e in zip(grads, errors, strict=True)]
        mean = torch.stack(matrices).mean(0)
        projection = span(mean @ q)
        q = mean.T @ torch.linalg.qr(mean @ q)[0]
        want = projection @ mean
        errors = [m - projection @ m if feedback else torch.zeros_like(m) for m in matrices]
        applied = together(world, ranks, grads, shuffle=step)
        torch.testing.assert_close(applied[0][0].double(), want, rtol=1e-3, atol=1e-4)
        if feedback:
            for rank, error in zip(ranks, errors, strict=True):
                torch.testing.assert_close(residuals(rank)["weight"], error, rtol=1e-3, atol=1e-4)


def test_a_gradient_of_low_rank_is_sent_exactly():
    """A warm start needs one step for the column space."""
    world, ranks = replicas(2, PowerSGD, model=linear(), rank=4, values="fp32")
    generator = torch.Generator().manual_seed(3)
    left, right = torch.randn(48, 4, generator=generator), torch.randn(4, 64, generator=generator)
    applied = together(world, ranks, [[left @ right], [3 * left @ right]])
    torch.testing.assert_close(applied[0][0], 2 * left @ right, rtol=1e-4, atol=1e-4)


def test_the_warm_start_reduces_the_error():
    """With the same gradient in every step, the iteration converges to the best approximation."""
    world, ranks = replicas(1, PowerSGD, model=linear(), rank=2, values="fp32", error_feedback=False)
    (given,), errors = gradients(ranks[0].model, seed=1), []
    for _ in range(30):
        ((applied,),) = together(world, ranks, [[given.clone()]])
        errors.append(float((applied - given).norm()))
    best = float(torch.linalg.svdvals(given)[2:].norm())
    assert best <= errors[-1] * (1 + 1e-5) and errors[-1] < 1.01 * best < errors[0]


def test_a_matrix_that_would_not_get_smaller_is_sent_complete():
    world, ranks = replicas(2, PowerSGD, model=linear(), rank=28, values="fp32")  # 28 * (48 + 64) > 48 * 64
    grads = [gradients(r.model, seed=r.rank) for r in ranks]
    mean = (grads[0][0] + grads[1][0]) / 2
    torch.testing.assert_close(together(world, ranks, grads)[0][0], mean)


@pytest.mark.parametrize(("values", "size"), [("fp16", 2), ("fp32", 4)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_sent_are_those_of_two_factors(values, size, ranks):
    world, group = replicas(ranks, PowerSGD, model=linear(256, 512), rank=4, values=values)
    random_steps(world, group, range(3))  # in the third one weights are not compared
    last = group[0].compression.stats()["last"]
    want = 2 * (ranks - 1) / ranks * size * (4 * (256 + 512) + 1)  # and one validity flag
    assert last["wire_bytes"] == last["values_bytes"] == pytest.approx(want)


def test_fp16_factors_of_large_gradients_are_finite():
    world, ranks = replicas(4, PowerSGD, model=linear(), rank=2)
    applied = together(world, ranks, [[g * 3e4 for g in gradients(r.model, r.rank)] for r in ranks])
    assert all(g.isfinite().all() for rank in applied for g in rank)
    assert equal(*applied[:2])


def test_a_state_of_another_rank_raises_an_error():
    _, (one,) = replicas(1, PowerSGD, rank=2)
    _, (other,) = replicas(1, PowerSGD, rank=3)
    with pytest.raises(ValueError, match=r"made_with.rank: the state was made with 2, this compressor has 3"):
        other.compression.load_state_dict(one.compression.state_dict())
