"""average_gradients(), without processes. (tests/harness.py has it as a host for the conditions of all methods.)"""

import warnings

import pytest
import torch
from harness import LoopRank, in_backward, random_steps, replicas, together, toy_model
from methods import METHODS
from models import gradients, mixed_model

from hvd_compress import IWP, DeMo, LocalSteps, NoCompression, average_gradients, ddp_hook
from hvd_compress.engine.dense import DenseAverages


@pytest.mark.parametrize("method", ["iwp", "demo", "quantized", "none"])
def test_its_averages_are_those_of_ddps_hook(method):
    averages = []
    for host in ("ddp", "loop"):
        world, ranks = replicas(3, METHODS[method], host=host)
        averages.append(random_steps(world, ranks, range(4)))
    for ours, theirs in zip(*averages, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert any(average.any() for average in averages[0][0])


def test_ranks_have_the_same_gradients_whichever_are_missing():
    world, ranks = replicas(2, NoCompression, host="loop")
    grads = [gradients(rank.model, seed=rank.rank) for rank in ranks]
    kept = grads[0][-1].clone()
    grads[0][0] = grads[1][0] = grads[1][-1] = None  # a dense one and a compressed one
    grads[0][1].zero_()
    grads[1][1] = None
    averages = together(world, ranks, grads)
    for ours in averages:
        torch.testing.assert_close(ours[-1], kept / 2)
        assert not ours[0].any() and not ours[1].any()


def test_gradients_that_were_not_zeroed_are_refused():
    rank = replicas(1, DeMo, torch.nn.Linear(40, 30), host="loop")[1][0]
    optimizer = torch.optim.SGD(rank.model.parameters(), lr=0.1)
    for step in range(3):
        rank.model(torch.ones(2, 40)).sum().backward()
        if step == 2:
            with pytest.raises(RuntimeError, match="contains the last average"):
                average_gradients(rank.compression)
            return
        average_gradients(rank.compression)
        optimizer.step()
        if step == 0:
            optimizer.zero_grad()


def test_a_call_that_failed_is_repeated_without_loss():
    (rank,) = replicas(1, IWP, host="loop")[1]
    model, grads, first = rank.model, gradients(rank.model, seed=0), rank.model.first.weight
    for p, grad in zip(model.parameters(), grads, strict=True):
        p.grad = grad.clone()
    first.grad_dtype, first.grad = None, torch.zeros(first.shape, dtype=torch.int32)
    with pytest.raises(TypeError, match="int32"):
        average_gradients(rank.compression)
    first.grad = grads[0].clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DenseAverages, "start", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            average_gradients(rank.compression)
    average_gradients(rank.compression)
    for (name, p), grad in zip(model.named_parameters(), grads, strict=True):
        residual = rank.compression.residual(name)
        torch.testing.assert_close(p.grad if residual is None else p.grad + residual, grad, rtol=0, atol=1e-2)


def test_only_one_way_passes_gradients_in():
    world, (rank,) = replicas(1, IWP, host="loop")
    random_steps(world, [rank], range(1))
    bucket = replicas(1, IWP, host="ddp")[1][0].buckets(gradients(rank.model, 0))[0]
    with pytest.raises(RuntimeError, match=r"from average_gradients\(\), and now from ddp_hook"):
        in_backward(lambda: ddp_hook(rank.compression, bucket))
    world, (other,) = replicas(1, IWP, host="ddp")
    random_steps(world, [other], range(1))
    with pytest.raises(RuntimeError, match=r"from ddp_hook, and now from average_gradients\(\)"):
        average_gradients(other.compression)


def test_other_hosts_and_places_are_refused():
    (rank,) = replicas(1, IWP, host="loop")[1]
    with pytest.raises(RuntimeError, match="inside a backward pass"):
        in_backward(lambda: average_gradients(rank.compression))
    with pytest.raises(RuntimeError, match="bound to Horovod"):
        average_gradients(replicas(1, IWP)[1][0].compression)
    local = LocalSteps(rank.compression, torch.optim.SGD(rank.model.parameters(), lr=0.1), 3)
    with pytest.raises(RuntimeError, match="belongs to LocalSteps"):
        average_gradients(rank.compression)
    assert not local.finish(rank.model)


@pytest.mark.parametrize("change", ["nothing", "rounding", "weights", "steps", "not a number"])
def test_weights_that_drift_apart_are_a_warning(change):
    """Those of unequal devices differ by their rounding."""
    world, ranks = replicas(2, NoCompression, toy_model(), host="loop")
    rates = (0.1, 0.05) if change == "steps" else (0.1, 0.1)
    optimizers = [torch.optim.SGD(r.model.parameters(), rate) for r, rate in zip(ranks, rates, strict=True)]
    with torch.no_grad():
        factor = {"rounding": 1 + 1e-6, "weights": 1.01, "not a number": float("nan")}.get(change, 1.0)
        ranks[1].model[0].weight *= factor
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        random_steps(world, ranks, range(12), optimizers=optimizers)
    assert any("weights differ" in str(w.message) for w in caught) == (change in ("weights", "steps", "not a number"))


def test_a_step_without_the_call_is_a_warning():
    rank = replicas(1, IWP, mixed_model(), host="loop")[1][0]
    assert isinstance(rank, LoopRank)
    optimizer = torch.optim.SGD(rank.model.parameters(), lr=0.1)
    for p in rank.model.parameters():
        p.grad = torch.ones_like(p)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert ["average_gradients" in str(w.message) for w in caught] == [True]


def test_gradients_of_other_kinds():
    """Conjugated ones are averaged, sparse ones refused, missing ones have the dtype that the parameter wants."""
    model = torch.nn.ParameterDict({"wave": torch.randn(3, dtype=torch.complex64), "other": torch.ones(3)})
    (rank,) = replicas(1, NoCompression, model, host="loop")[1]
    wave, other = rank.model["wave"], rank.model["other"]
    other.grad_dtype = torch.float16
    (wave.conj() * torch.tensor(2 + 1j)).real.sum().backward()
    wanted = wave.grad.clone()
    average_gradients(rank.compression)
    torch.testing.assert_close(wave.grad, wanted)
    assert other.grad.dtype == torch.float16 and not other.grad.any()
    other.grad_dtype, other.grad = None, torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match="other: hvd_compress does not support sparse gradients"):
        average_gradients(rank.compression)
