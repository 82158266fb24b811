"""Horovod's compressor protocol, without Horovod."""

import gc
import warnings
import weakref

import pytest
import torch
from harness import random_steps, replicas, single, together
from models import gradients

from hvd_compress import IWP


def test_parameters_passed_by_adasum_are_not_compressed():
    model = torch.nn.Linear(64, 64)
    compression = single(model)
    with pytest.warns(UserWarning, match="Adasum"):
        payload, ctx = compression.compress(model.weight)
    assert torch.equal(payload, model.weight) and ctx is None


def _steps_without_gradients(given):
    """Two steps of Horovod's optimizer with the compression ``given``. Returns a compressor's warnings."""
    model = torch.nn.Linear(64, 64)
    compression = single(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer._compression = compression if given == "this" else given
    model(torch.ones(1, 64)).sum().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
        optimizer.step()
    return caught


def test_a_compressor_that_the_optimizer_was_not_given_causes_one_warning():
    (warning,) = _steps_without_gradients(given=object())
    assert "DistributedOptimizer was not given this compressor, which has received no" in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.parametrize("given", [None, "this"])
def test_a_plain_optimizer_and_one_that_was_given_the_compressor_cause_no_warning(given):
    assert not _steps_without_gradients(given)


def test_a_wrapped_compressor_causes_no_warning():
    """An object of the user's between Horovod and the compressor."""
    world, (rank,) = replicas(1, IWP)
    optimizer = torch.optim.SGD(rank.model.parameters(), lr=0.1)
    optimizer._compression = object()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for p in rank.model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()  # hvd.broadcast_optimizer_state()
        random_steps(world, [rank], range(1))
        optimizer.step()


def test_sparse_gradients_are_returned_unchanged():
    compression = single()
    grad = torch.ones(64, 64).to_sparse()
    assert compression.decompress(grad, None) is grad


def test_a_parameter_that_the_optimizer_does_not_hold_causes_a_warning():
    """The other parameters are exchanged."""
    world, ranks = replicas(2, IWP, density=1 / 16, bucket_mb=1)
    for r in ranks:
        r.model.deep = torch.nn.Identity()
    with pytest.warns(UserWarning, match=r"no gradients arrived for deep.weight"):
        for step in range(3):
            applied = together(world, ranks, [gradients(r.model, step * 2 + r.rank) for r in ranks], shuffle=step)
    assert all(torch.equal(a, b) for a, b in zip(*applied, strict=True))
    assert all(a.isfinite().all() for a in applied[0])


def test_zero_grad_frees_the_gradients_memory():
    """A compressor keeps no reference to gradients between steps."""
    world, ranks = replicas(1, IWP, density=1 / 16)
    random_steps(world, ranks, range(2))
    seen = [weakref.ref(p.grad) for p in ranks[0].model.parameters()]
    for p in ranks[0].model.parameters():
        p.grad = None
    gc.collect()
    assert all(ref() is None for ref in seen)


def test_a_gradient_that_requires_grad_receives_the_average():
    """It has another memory order than its parameter, so it is copied; Horovod calls with autograd enabled."""
    _, (rank,) = replicas(1, IWP, model=torch.nn.Conv2d(16, 16, 3, bias=False), density=1.0, values="fp32")
    (parameter,) = rank.model.parameters()
    parameter.grad = torch.ones_like(parameter).to(memory_format=torch.channels_last).requires_grad_()
    compression = rank.compression
    result = compression.decompress(*compression.compress(parameter.grad))
    assert result is parameter.grad and result.is_leaf
    torch.testing.assert_close(result.detach(), torch.ones_like(result))


def test_a_step_after_a_caught_exception_needs_a_reset():
    _, (rank,) = replicas(1, IWP)
    p = rank.model.wide.weight
    p.grad = torch.ones_like(p)
    rank.compression.compress(p.grad)  # the exception comes here
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r"compressed twice in one step .*call reset\(\)"):
        rank.compression.compress(p.grad)
    rank.compression.reset()
    assert all(grad.isfinite().all() for grad in rank.exchange(gradients(rank.model, 1)))
