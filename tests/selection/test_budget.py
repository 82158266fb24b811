"""Each parameter's share of the slots."""

from functools import partial

import pytest
import torch
from harness import random_steps, replicas
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress import DGC, FFT, IWP, MIPD, SlimDP, TopK
from hvd_compress.carriers.mirror import Mirror
from hvd_compress.selection.budget import apportion, shares


@given(st.data())
def test_apportioned_slots_add_up_and_respect_their_limits(data):
    count = data.draw(st.integers(1, 12))
    ceilings = data.draw(st.lists(st.integers(1, 5000), min_size=count, max_size=count))
    weights = data.draw(st.lists(st.floats(1e-3, 1e4), min_size=count, max_size=count))
    total = data.draw(st.integers(1, 6000))
    parts = apportion(total, weights, ceilings)
    assert sum(parts) == min(total, sum(ceilings))
    assert all(0 <= part <= ceiling for part, ceiling in zip(parts, ceilings, strict=True))
    if total >= count:
        assert min(parts) >= 1
    assert parts == apportion(total, weights, ceilings)


def test_equal_shares_are_exact_if_they_divide_evenly():
    sizes = [1024, 36864, 2304]
    assert apportion(sum(sizes) // 64, sizes, sizes) == [size // 64 for size in sizes]
    assert apportion(3, [1.0, 5.0, 2.0, 4.0], [9] * 4) == [0, 1, 1, 1]


def test_shares_follow_importance_within_a_factor_of_four():
    sizes = [1000, 1000, 1000]
    even = shares([5.0, 5.0, 5.0], sizes)
    assert even == [1000.0] * 3
    low, middle, high = shares([0.001, 1.0, 100.0], sizes)
    assert low == 250.0 and low <= middle < high <= 4000.0
    assert shares([0.0, 0.0], [3, 4]) == [3.0, 4.0]


@pytest.mark.parametrize("kind", [TopK, DGC, SlimDP, IWP, FFT, MIPD])
def test_every_parameter_has_a_slot(kind):
    """Even if the density gives fewer slots than there are parameters."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 33, bias=False) for _ in range(10)))
    world, ranks = replicas(2, partial(kind, density=1 / 4096), model=model)
    assert len(ranks[0].compression.buckets) == 1
    random_steps(world, ranks, range(4))
    assert all(slots >= 1 for slots in ranks[0].compression.works[0].decider.picker.slots)


@pytest.mark.parametrize("method", [MIPD, SlimDP])
def test_shares_follow_the_significance_that_the_method_computes(method):
    """Gradients are equal, so the residuals' magnitudes would give equal shares."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(2)))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[1].weight.copy_(torch.eye(64))
    compression = method(model, density=1 / 16, budget_interval=1, collectives=Mirror(2))
    for layer in model:
        layer.weight.grad = torch.ones(64, 64)
    for payload, context in [compression.compress(layer.weight.grad) for layer in reversed(model)]:
        compression.decompress(payload, context)
    (work,) = compression.works
    dense, sparse = (work._shares.weights[index] for index in (1, 0))  # a bucket begins with the last layer
    assert dense > 1.5 * sparse
