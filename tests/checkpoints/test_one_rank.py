"""state_dict() and load_state_dict(), of one rank in one layout."""

import copy
import itertools
import pickle
from functools import partial

import pytest
import torch
from harness import HOSTS, random_steps, replicas, residuals, single, together, waiting_average
from methods import EACH, METHODS, SMALL, TRAINED, Guessing, fitting
from models import compressed, equal, gradients, mixed_model

from hvd_compress import FFT, IWP, MIPD, MP2, DeMo, SlimDP, reshard
from hvd_compress.engine.state import same
from hvd_compress.methods import iwp

#: Ranks, host and momentum, in turn: each value of each in the short run.
SHORT = [(2, "horovod", 0.9), ((2, 2), "ddp", 0.0)]
LONG = [setting for setting in itertools.product((2, (2, 2)), HOSTS, (0.0, 0.9)) if setting not in SHORT]


def check_resumed(world, ranks, fresh_world, fresh, states, steps):
    """Goes on with both: they train alike to the last bit, and end in the same state."""
    for r, state in zip(fresh, states, strict=True):
        r.compression.load_state_dict(state)
    straight, resumed = random_steps(world, ranks, steps)[0], random_steps(fresh_world, fresh, steps)[0]
    assert equal(straight, resumed)
    for one, other in zip(ranks, fresh, strict=True):
        one, other = one.compression.state_dict(), other.compression.state_dict()
        # After loading, ranks compare the state once: a few bytes more.
        del one["per_rank"]["wire_stats"]["total"]["budget"], other["per_rank"]["wire_stats"]["total"]["budget"]
        assert same(one, other)


@pytest.mark.alternate("setting")
@pytest.mark.parametrize("setting", [*SHORT, *(pytest.param(each, marks=pytest.mark.slow) for each in LONG)], ids=str)
@pytest.mark.parametrize("name", EACH)
def test_a_checkpoint_resumes_bit_exactly(name, setting, tmp_path):
    size, host, momentum = setting
    method = partial(METHODS[name], **SMALL)
    method = partial(method, **fitting(method, {"momentum": momentum, "warmup_steps": 4}))
    world, ranks = replicas(size, method, host=host)
    random_steps(world, ranks, range(6))
    for r in ranks:
        torch.save(r.compression.state_dict(), tmp_path / f"{r.rank}.pt")
    states = [torch.load(tmp_path / f"{r.rank}.pt", weights_only=True) for r in ranks]
    check_resumed(world, ranks, *replicas(size, method, host=host), states, range(6, 12))


@pytest.mark.parametrize(
    "build",
    [
        partial(Guessing, density=1 / 9),
        *(partial(method, values="lloyd4", density=1 / 9) for method in (MP2, MIPD, SlimDP)),
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
    check_resumed(world, ranks, *replicas(2, build, model=model), states, range(22, 26))
    for r in ranks:
        (work,) = r.compression.works
        assert work.parts["history"].last_sent[model.weight.numel() :].any(), "padding must have been selected"


@pytest.mark.parametrize("momentum", [pytest.param(0.0, marks=pytest.mark.slow), 0.9])
@pytest.mark.parametrize("name", EACH)
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


def states_of(ranks):
    """Without statistics."""
    states = [copy.deepcopy(r.compression.state_dict()) for r in ranks]
    for state in states:
        del state["per_rank"]["wire_stats"]
    return states


@pytest.mark.alternate("setting")
@pytest.mark.parametrize("setting", [("horovod", 0.0), ("ddp", 0.9)], ids=str)
@pytest.mark.parametrize("name", [*EACH, "demo-sign"])
def test_a_state_between_an_average_and_its_step_is_that_before_the_average(name, setting):
    """As if the average had been discarded. Saving changes nothing: the average may still be applied, or discarded."""
    host, momentum = setting
    method = partial({**METHODS, "demo-sign": DeMo}[name], **SMALL)
    method = partial(method, **({} if name == "demo-sign" else fitting(method, {"momentum": momentum})))
    worlds, groups = zip(*(waiting_average(method, host) for _ in range(4)), strict=True)
    saved, plain, discarded, expected = groups
    states = states_of(saved)
    assert same(states, states_of(saved)) and same(states, states_of(discarded))
    _, loaded = replicas(2, method, host=host)
    for r, other in zip(loaded, saved, strict=True):
        r.compression.load_state_dict(other.compression.state_dict())
    for r in (*discarded, *expected):
        r.compression.discard_step()
    assert same(states, states_of(discarded)) and same(states, states_of(expected))
    for r, other in zip(expected, loaded, strict=True):
        assert equal(residuals(r).values(), residuals(other).values())
    for r in (*saved, *plain):
        r.optimizer.step()
    assert same(states_of(saved), states_of(plain))
    after = [random_steps(world, group, [4])[0] for world, group in zip(worlds, groups, strict=True)]
    assert equal(after[0], after[1]), "saving has changed the step"
    assert equal(after[2], after[3]), "saving has changed what discard_step() restores"


@pytest.mark.parametrize("name", [name for name in TRAINED if name != "none"])
def test_the_values_are_copies_and_a_residual_of_entries_is_copied_once(name):
    """Where it is kept by entries, as it is owed."""
    world, ranks = replicas(2, TRAINED[name])
    random_steps(world, ranks, range(2))
    state = ranks[0].compression.state_dict()
    kept = copy.deepcopy(state)
    random_steps(world, ranks, range(2, 3))
    assert same(state, kept)
    exact = state["per_rank"]["buckets"]["0"]["residual"]["wide.weight"]
    one = isinstance(exact, dict) and exact["entries"] is state["owed"]["residual"]["wide.weight"]
    assert one == (name not in ("iwp", "fft", "demo")), "block means and transforms are not entries"


@pytest.mark.parametrize(
    ("saved", "loaded", "says"),
    [
        ("iwp-fp16", "iwp", "made_with.values: the state was made with 'fp16', this compressor has 'lanes4'"),
        ("iwp", "iwp-no-means", "made_with.block means: the state was made with True"),
        ("iwp", "mipd", "method: the state was made with 'IWP', this compressor has 'MIPD'"),
        ("powersgd", "powersgd-fp32", "made_with.rank: the state was made with 2, this compressor has 3"),
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


def test_the_state_of_other_parameters_another_method_version_or_momentum_raises_an_error():
    linear, wider = partial(torch.nn.Linear, 64, 64), torch.nn.Linear(64, 128)
    state = single(linear(), momentum=0.9).state_dict()
    for other, given, says in (
        (single(momentum=0.9), state, r"parameters.conv.weight, .*: missing.*; shared.parameters.weight: not of"),
        (single(wider, momentum=0.9), state, r"parameters.weight: .* with \[64, 64\], this compressor has \[128, 64\]"),
        (single(linear()), {**state, "method": "Other"}, "method: the state was made with 'Other', this compressor"),
        (single(linear()), {"format": 5, "method": "IWP", "step": 1}, r"format: .* \(the state is of another version"),
        (single(linear(), momentum=0.8), state, "_state.momentum: .* made with 0.9, this compressor has 0.8"),
    ):
        with pytest.raises(ValueError, match=says):
            other.load_state_dict(given)


def test_a_state_fits_whatever_is_frozen_at_present():
    """A layer that is trained later is not compressed, and has a velocity then."""
    models = [mixed_model() for _ in range(2)]
    for model in models:
        model.deep.requires_grad_(False)
    one, other = (single(model, momentum=0.9) for model in models)
    frozen = one.state_dict()
    models[0].deep.requires_grad_(True)
    trained = one.state_dict()
    kept = [state["owed"]["velocity"]["deep.weight"] is not None for state in (frozen, trained)]
    assert kept == [False, True]
    for each in (one, other):
        for state in (frozen, trained):
            each.load_state_dict(state)
            each.load_state_dict(reshard([state]))


def test_the_state_of_a_contiguous_model_loads_into_a_channels_last_one():
    model = mixed_model().to(memory_format=torch.contiguous_format)
    world, ranks = replicas(1, IWP, model=model, density=1 / 16, block_means=False)
    random_steps(world, ranks, range(2))
    last = mixed_model().to(memory_format=torch.channels_last)
    _, (other,) = replicas(1, IWP, model=last, density=1 / 16, block_means=False)
    other.compression.load_state_dict(ranks[0].compression.state_dict())
    assert equal(residuals(ranks[0]).values(), residuals(other).values())


@pytest.mark.parametrize("build", [IWP, FFT])
def test_block_means_and_a_spectrum_of_another_memory_order_raise_an_error(build):
    model = torch.nn.Conv2d(8, 33, 3)
    _, (one,) = replicas(1, build, model=model.to(memory_format=torch.channels_last))
    state = one.compression.state_dict()
    _, (other,) = replicas(1, build, model=model.to(memory_format=torch.contiguous_format))
    with pytest.raises(ValueError, match=r"use the same memory_format"):
        other.compression.load_state_dict(state)


def test_a_compressor_cannot_be_pickled():
    with pytest.raises(TypeError, match=r"save model\.module"):
        pickle.dumps(single())


def test_state_dict_in_the_middle_of_a_step_raises_an_error():
    model = mixed_model()
    compression = single(model)
    model.wide.weight.grad = torch.ones(47, 301)
    compression.compress(model.wide.weight.grad)
    with pytest.raises(RuntimeError, match="middle of a step"):
        compression.state_dict()
