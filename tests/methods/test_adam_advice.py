"""The warning for sparse gradients with Adam."""

import warnings
from functools import partial

import pytest
import torch
from harness import random_steps, replicas

from hvd_compress import FFT, IWP, QSGD, LocalSteps, TopK


def step(compression, optimizer):
    """The messages of the optimizer's step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compression.engine.clock.before_optimizer_step(optimizer)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("build", [IWP, FFT, TopK, QSGD, partial(IWP, density=1.0)])
def test_warns_once_of_adam_with_sparse_gradients(build, kind):
    world, ranks = replicas(2, build)
    random_steps(world, ranks, range(1))
    sparse = build in (IWP, FFT, TopK)
    optimizer = kind(ranks[0].model.parameters(), lr=0.1)
    messages = step(ranks[0].compression, optimizer)
    expected = sparse and kind is not torch.optim.SGD
    assert [("hvd_compress.DeMo with torch.optim.SGD" in text) for text in messages] == [True] * expected
    assert not step(ranks[0].compression, optimizer)


def test_local_steps_of_adam_are_what_it_advises():
    _, ranks = replicas(1, IWP)
    optimizer = torch.optim.AdamW(ranks[0].model.parameters(), lr=0.1)
    local = LocalSteps(ranks[0].compression, optimizer, period=2)
    assert not step(local.compression, optimizer)


def test_looking_at_the_optimizer_does_not_ask_the_schedule():
    """It may count its calls."""
    asked = []
    world, ranks = replicas(1, IWP, density=lambda step: asked.append(step) or 1 / 16)
    random_steps(world, ranks, range(1))
    before = len(asked)
    step(ranks[0].compression, torch.optim.AdamW(ranks[0].model.parameters(), lr=0.1))
    assert len(asked) == before
