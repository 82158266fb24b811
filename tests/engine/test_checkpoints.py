"""state_dict() and load_state_dict()."""

import copy
import itertools
import pickle
from functools import partial

import pytest
import torch
from harness import (
    HOSTS,
    compressed,
    equal,
    gradients,
    mixed_model,
    random_steps,
    replicas,
    residuals,
    single,
    together,
    waiting_average,
)
from methods import METHODS, SMALL, Guessing, fitting

from hvd_compress import FFT, IWP, MIPD, MP2, QSGD, SlimDP, reshard
from hvd_compress.engine.state import same, save
from hvd_compress.methods import iwp

#: Ranks, host and momentum: each value of each in the short run.
SHORT = [(2, "horovod", 0.9), ((2, 2), "ddp", 0.0)]
LONG = [setting for setting in itertools.product((2, (2, 2)), HOSTS, (0.0, 0.9)) if setting not in SHORT]


@pytest.mark.parametrize(
    ("size", "host", "momentum"), [*SHORT, *(pytest.param(*setting, marks=pytest.mark.slow) for setting in LONG)]
)
@pytest.mark.parametrize("name", METHODS)
def test_a_checkpoint_resumes_bit_exactly(name, size, host, momentum, tmp_path):
    method = partial(METHODS[name], **SMALL)
    method = partial(method, **fitting(method, {"momentum": momentum, "warmup_steps": 4}))
    world, ranks = replicas(size, method, host=host)
    random_steps(world, ranks, range(6))
    for r in ranks:
        torch.save(r.compression.state_dict(), tmp_path / f"{r.rank}.pt")
    straight = random_steps(world, ranks, range(6, 12))[0]

    world, fresh = replicas(size, method, host=host)
    for r in fresh:
        r.compression.load_state_dict(torch.load(tmp_path / f"{r.rank}.pt", weights_only=True))
    resumed = random_steps(world, fresh, range(6, 12))[0]
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))
    for one, other in zip(ranks, fresh, strict=True):
        for name, residual in residuals(one).items():
            assert torch.equal(residual, residuals(other)[name])
        # After loading, ranks compare the state once: a few bytes more under "budget".
        for kind in ("dense_bytes", "values_bytes", "indices_bytes", "dense_tensor_bytes"):
            assert one.compression.stats()["total"][kind] == other.compression.stats()["total"][kind]


@pytest.mark.parametrize("momentum", [pytest.param(0.0, marks=pytest.mark.slow), 0.9])
@pytest.mark.parametrize("name", METHODS)
def test_the_state_after_gradients_that_are_not_finite_loads(name, momentum, monkeypatch):
    """The averages are applied: the parameters are not finite either, and floors and predictions come from them."""
    monkeypatch.setattr(iwp, "_FLOOR_INTERVAL", 1)
    method = partial(METHODS[name], **SMALL)
    method = partial(method, **fitting(method, {"momentum": momentum}))
    world, ranks = replicas(2, method)
    for step in range(6):
        grads = [gradients(r.model, seed=1000 * step + r.rank) for r in ranks]
        if step in (2, 4):
            for number, grad in enumerate(grads[step // 4]):
                place = (1, 7 % grad.shape[1]) if compressed(grad) else (0,) * grad.dim()
                grad[place] = float("nan") if number % 4 else float("inf")
        for rank, applied in zip(ranks, together(world, ranks, grads), strict=True):
            for p, average in zip(rank.model.parameters(), applied, strict=True):
                p.data.sub_(average, alpha=0.01)
    assert not ranks[0].model.wide.weight.isfinite().all()
    states = [r.compression.state_dict() for r in ranks]
    _, fresh = replicas(2, method)
    for r, state in zip(fresh, states, strict=True):
        r.compression.load_state_dict(state)
        r.compression.load_state_dict(reshard(states))


@pytest.mark.parametrize(
    "build",
    [
        partial(Guessing, density=1 / 9),
        partial(MP2, values="lloyd4", density=1 / 9),
        partial(MIPD, values="lloyd4", density=1 / 9),
        partial(SlimDP, values="lloyd4", density=1 / 9),
    ],
)
def test_a_checkpoint_resumes_bit_exactly_if_padding_is_selected(build):
    """The last of five blocks has 16 entries and 23 slots, and a codec without a zero leaves errors in its padding. In
    the first step after the checkpoint, step 22 with periods of 9, MP2 predicts that block."""
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 26, bias=False)
    world, ranks = replicas(2, build, model=model)
    random_steps(world, ranks, range(22))
    states = [copy.deepcopy(r.compression.state_dict()) for r in ranks]
    straight = random_steps(world, ranks, range(22, 26))[0]
    world, fresh = replicas(2, build, model=model)
    for r, state in zip(fresh, states, strict=True):
        r.compression.load_state_dict(state)
    resumed = random_steps(world, fresh, range(22, 26))[0]
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))
    for one, other in zip(ranks, fresh, strict=True):
        (before,), (after,) = one.compression.works, other.compression.works
        assert same(save(before.state()), save(after.state()))
        last_sent = before.parts["history"].last_sent
        assert last_sent[model.weight.numel() :].any(), "padding must have been selected"


@pytest.mark.parametrize(
    ("saved", "loaded", "says"),
    [
        ("iwp-fp16", "iwp", "made_with.values: the state was made with 'fp16', this compressor has 'lanes4'"),
        ("iwp", "iwp-fp16", "made_with.values: the state was made with 'lanes4'"),
        ("mipd", "mipd-whole", "made_with.layerwise: the state was made with True"),
        ("iwp", "iwp-no-means", "made_with.block means: the state was made with True"),
        ("iwp", "mipd", "method: the state was made with 'IWP', this compressor has 'MIPD'"),
        ("powersgd", "powersgd-cold", "made_with.rank: the state was made with 2, this compressor has 3"),
    ],
)
def test_a_state_of_other_options_raises_an_error_and_loads_nothing(saved, loaded, says):
    world, ranks = replicas(1, METHODS[saved])
    random_steps(world, ranks, range(3))
    _, (other,) = replicas(1, METHODS[loaded])
    with pytest.raises(ValueError, match=says):
        other.compression.load_state_dict(ranks[0].compression.state_dict())
    assert other.compression.state_dict()["step"] == 0
    assert all(not held.any() for held in residuals(other).values())


def test_the_state_of_a_contiguous_model_loads_into_a_channels_last_one():
    model = mixed_model().to(memory_format=torch.contiguous_format)
    world, ranks = replicas(1, IWP, model=model, density=1 / 16, block_means=False)
    random_steps(world, ranks, range(2))
    last = mixed_model().to(memory_format=torch.channels_last)
    world, others = replicas(1, IWP, model=last, density=1 / 16, block_means=False)
    others[0].compression.load_state_dict(ranks[0].compression.state_dict())
    for name, residual in residuals(ranks[0]).items():
        assert torch.equal(residual, residuals(others[0])[name])


def test_block_means_of_another_memory_order_raise_an_error():
    _, (one,) = replicas(1, IWP, model=mixed_model().to(memory_format=torch.contiguous_format))
    _, (other,) = replicas(1, IWP, model=mixed_model().to(memory_format=torch.channels_last))
    with pytest.raises(ValueError, match=r"use the same memory_format"):
        other.compression.load_state_dict(one.compression.state_dict())


def test_a_compressor_cannot_be_pickled():
    _, (rank,) = replicas(1, IWP)
    with pytest.raises(TypeError, match=r"save model\.module"):
        pickle.dumps(rank.compression)


def test_the_state_of_other_parameters_or_another_method_raises_an_error():
    state = single(torch.nn.Linear(64, 64)).state_dict()
    with pytest.raises(ValueError, match=r"parameters.conv.weight, .*: missing.*; shared.parameters.weight: not of"):
        single().load_state_dict(state)
    with pytest.raises(ValueError, match=r"parameters.weight: .* with \[64, 64\], this compressor has \[128, 64\]"):
        single(torch.nn.Linear(64, 128)).load_state_dict(state)
    with pytest.raises(ValueError, match="method: the state was made with 'Other', this compressor has 'IWP'"):
        single(torch.nn.Linear(64, 64)).load_state_dict({**state, "method": "Other"})
    with pytest.raises(ValueError, match=r"format: .* \(the state is of another version of hvd_compress\)"):
        single(torch.nn.Linear(64, 64)).load_state_dict({"format": 2, "method": "IWP", "step": 1, "tensors": {}})


def test_a_state_with_another_momentum_raises_an_error_and_loads_nothing():
    model = torch.nn.Linear(64, 64)
    state = single(model, momentum=0.9).state_dict()
    state["per_rank"]["buckets"]["0"]["residual"]["weight"]["entries"].fill_(7.0)
    other = single(model, momentum=0.8)
    with pytest.raises(ValueError, match=r"_state.momentum: the state was made with 0.9, this compressor has 0.8"):
        other.load_state_dict(state)
    assert other.stats()["residual_norm"] == 0.0


def test_state_dict_in_the_middle_of_a_step_raises_an_error():
    model = mixed_model()
    compression = single(model)
    model.wide.weight.grad = torch.ones(47, 301)
    compression.compress(model.wide.weight.grad)
    with pytest.raises(RuntimeError, match="middle of a step"):
        compression.state_dict()


@pytest.mark.parametrize(("host", "momentum"), [("horovod", 0.0), ("ddp", 0.9)])
@pytest.mark.parametrize("name", METHODS)
def test_a_state_between_an_average_and_its_step_is_that_before_the_average(name, host, momentum):
    """As if the average had been discarded. Saving changes nothing: the average may still be applied, or discarded."""
    method = partial(METHODS[name], **SMALL)
    method = partial(method, **fitting(method, {"momentum": momentum}))
    worlds, groups = zip(*(waiting_average(method, host) for _ in range(4)), strict=True)
    saved, plain, discarded, expected = groups
    states = [[copy.deepcopy(r.compression.state_dict()) for r in group] for group in (saved, discarded)]
    for r in (*discarded, *expected):
        r.compression.discard_step()
    _, loaded = replicas(2, method, host=host)
    for r, one, other in zip(loaded, *states, strict=True):
        assert same(one, other)
        r.compression.load_state_dict(one)
    for r, one, other in zip(expected, discarded, loaded, strict=True):
        for key, residual in residuals(r).items():
            assert torch.equal(residual, residuals(one)[key]) and torch.equal(residual, residuals(other)[key]), key
    for group in saved, plain:
        for r in group:
            r.optimizer.step()
    after = [random_steps(world, group, [4])[0] for world, group in zip(worlds, groups, strict=True)]
    assert equal(after[0], after[1]), "saving has changed the step"
    assert equal(after[2], after[3]), "saving has changed what discard_step() restores"


def test_a_state_with_error_feedback_does_not_load_without():
    _, (feedback,) = replicas(1, partial(QSGD, error_feedback=True))
    _, (other,) = replicas(1, QSGD)
    with pytest.raises(ValueError, match="error feedback"):
        other.compression.load_state_dict(feedback.compression.state_dict())


def test_a_spectrum_of_another_memory_order_raises_an_error():
    model = torch.nn.Conv2d(8, 33, 3)
    _, (one,) = replicas(1, FFT, model=model.to(memory_format=torch.channels_last))
    state = one.compression.state_dict()
    _, (other,) = replicas(1, FFT, model=model.to(memory_format=torch.contiguous_format))
    with pytest.raises(ValueError, match=r"use the same memory_format"):
        other.compression.load_state_dict(state)
