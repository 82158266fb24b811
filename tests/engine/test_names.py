"""Names of parameters in wrapped models: those of the model itself, so that states fit it with and without wrappers."""

import copy
import itertools
from functools import partial

import pytest
import torch
from harness import Rank, random_steps, replicas, residuals, toy_model
from methods import METHODS, SMALL, fitting
from models import mixed_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

from hvd_compress import IWP, DeMo, LocalSteps, TopK, reshard
from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.engine.arguments import find_name, named_pairs, plain_names
from hvd_compress.engine.state import same


def held_as(name, model):
    """In an attribute of this name, as wrappers that need a process group do."""
    wrapper = torch.nn.Module()
    setattr(wrapper, name, model)
    return wrapper


def children_in(wrap, model):
    for name, child in list(model.named_children()):
        setattr(model, name, wrap(child))
    return model


WRAPPERS = {
    "compiled": torch.compile,
    "compiled-parts": partial(children_in, torch.compile),
    "parallel": torch.nn.DataParallel,
    "averaged": AveragedModel,
    "compiled-parallel": lambda model: torch.compile(torch.nn.DataParallel(model)),
    "parallel-compiled": lambda model: torch.nn.DataParallel(torch.compile(model)),
    "parallel-twice": lambda model: torch.nn.DataParallel(torch.nn.DataParallel(model)),
    "checkpointed": checkpoint_wrapper,
    "checkpointed-parts": partial(children_in, checkpoint_wrapper),
    "checkpointed-and-compiled-parts": lambda m: children_in(torch.compile, children_in(checkpoint_wrapper, m)),
    "fsdp1": lambda m: held_as("_fsdp_wrapped_module", children_in(partial(held_as, "_fsdp_wrapped_module"), m)),
    "fabric": lambda model: held_as("_forward_module", torch.nn.DataParallel(model)),
}
on_every_wrapper = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)


@on_every_wrapper
def test_names_are_those_of_the_model_itself(wrap):
    wrapped, plain = wrap(mixed_model()), [name for name, _ in mixed_model().named_parameters()]
    pairs = list(wrapped.named_parameters())
    for named in (wrapped, pairs, named_pairs(wrapped, "IWP(model)")):
        assert [name for name, _ in named_pairs(named, "IWP(model)")] == plain
    assert [id(p) for _, p in named_pairs(wrapped, "IWP(model)")] == [id(p) for _, p in pairs]
    for (given, _), name in zip(pairs, plain, strict=True):
        assert find_name(given, plain) == find_name(name, plain) == name


@pytest.mark.parametrize(
    "names",
    [
        ["module.weight", "weight"],
        ["module.module.weight", "module.weight"],
        ["a._orig_mod.weight", "a.weight"],
        ["_orig_mod.module.weight", "module.weight"],
        ["_orig_mod", "weight"],
        ["a._fsdp_wrapped_module.x", "a._checkpoint_wrapped_module.x", "module.y"],
    ],
)
def test_names_that_would_become_equal_or_empty_stay(names):
    assert plain_names(names) == names == plain_names(plain_names(names))
    assert [find_name(name, names) for name in names] == names


@pytest.mark.parametrize(
    ("names", "plain"),
    [
        (["_orig_mod.module.weight", "_orig_mod.weight"], ["module.weight", "weight"]),
        (["module.body.weight", "head.weight"], ["body.weight", "head.weight"]),
        (["body.module.weight", "modules.weight"], ["body.module.weight", "modules.weight"]),
        (["module.module"], ["module"]),
    ],
)
def test_a_step_that_would_make_names_equal_is_left_out(names, plain):
    assert plain_names(names) == plain == plain_names(plain)


def test_an_unknown_name_raises_an_error():
    _, (rank,) = replicas(1, IWP)
    for name in ("wide", "module.wide", "_orig_mod", "wide.module.weight", ""):
        with pytest.raises(KeyError):
            rank.compression.residual(name)


@on_every_wrapper
def test_a_state_fits_the_model_with_and_without_wrappers(wrap):
    wrapped = wrap(mixed_model())
    for name, models in itertools.product(("iwp", "demo"), ((mixed_model(), wrapped), (wrapped, mixed_model()))):
        method = partial(METHODS[name], **SMALL)
        method = partial(method, **fitting(method, {"momentum": 0.9}))
        world, ranks = replicas(2, method, model=models[0])
        random_steps(world, ranks, range(3))
        states = [copy.deepcopy(r.compression.state_dict()) for r in ranks]
        straight = random_steps(world, ranks, [3])[0]
        for given in (states, [reshard(states)] * 2):
            world, others = replicas(2, method, model=models[1])
            for r, state in zip(others, given, strict=True):
                r.compression.load_state_dict(state)
            if given is states:
                resumed = random_steps(world, others, [3])[0]
                assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))
                for a, b in zip(ranks, others, strict=True):
                    assert same(a.compression.state_dict(), b.compression.state_dict())


@on_every_wrapper
def test_residuals_have_the_names_of_both(wrap):
    world, ranks = replicas(2, IWP, model=wrap(mixed_model()))
    random_steps(world, ranks, range(2))
    compression = ranks[0].compression
    names = [name for name, _ in mixed_model().named_parameters()]
    assert any(compression.residual(name).any() for name in names)
    for name, given in zip(names, residuals(ranks[0]).values(), strict=True):
        assert torch.equal(compression.residual(name), given)
        assert torch.equal(compression.residual(f"module.{name}"), given)


@on_every_wrapper
def test_orthogonal_parameters_may_be_named_in_both_ways(wrap):
    wrapped, collectives = wrap(mixed_model()), ThreadWorld(1).collectives(0)
    plain = [name for name, _ in mixed_model().named_parameters()]
    given = [name for name, _ in wrapped.named_parameters()][plain.index("wide.weight")]
    texts = [DeMo(wrapped, orthogonal=[name], collectives=collectives).options() for name in (given, "wide.weight")]
    assert texts[0] == texts[1] and texts[0]["orthogonal"]
    with pytest.raises(ValueError, match=r"do not exist: deep\.bias$"):
        DeMo(wrapped, orthogonal=[given, "deep.bias"], collectives=collectives)


def test_ranks_that_differ_in_wrappers_agree():
    world = ThreadWorld(3)
    models = [mixed_model(), torch.compile(mixed_model()), torch.nn.DataParallel(mixed_model())]
    ranks = [Rank(world, number, model, IWP) for number, model in enumerate(models)]
    random_steps(world, ranks, range(2))
    assert all(rank.compression.step == 2 for rank in ranks)


@pytest.mark.parametrize("wrap", [torch.compile, torch.nn.DataParallel, partial(children_in, checkpoint_wrapper)])
def test_local_steps_resume_with_and_without_wrappers(wrap):
    def steps(model):
        compression = TopK(model, density=1 / 8, min_numel=64, collectives=ThreadWorld(1).collectives(0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return LocalSteps(compression, optimizer, 2, outer_momentum=0.9)

    plain, wrapped = steps(toy_model()), steps(wrap(toy_model()))
    assert "local_steps" in plain.state_dict()
    plain.load_state_dict(wrapped.state_dict())
    wrapped.load_state_dict(plain.state_dict())
