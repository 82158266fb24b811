"""The states of all ranks become one for another number of ranks, other nodes or buckets."""

import copy
from functools import partial

import pytest
import torch
from harness import Rank, random_steps, replicas, residuals, together, without_loss
from local_workers import workers
from methods import FORGETFUL, METHODS, SMALL, TRAINED, unless_kind
from models import equal, gradients

from hvd_compress import IWP, SlimDP, reshard
from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.engine.state import same


def states_of(ranks):
    return [r.compression.state_dict() for r in ranks]


#: Ranks before and after a conversion, without nodes and with. In the short run, a class has one of each, in turn.
CHANGES = (((3, 2), (2, 2), (3, 1)), ((3, (2, 2)), ((2, 3), 2), ((2, 2), (2, 3))))


@pytest.mark.parametrize(
    ("methods", "name", "before", "after"),
    [
        *(
            pytest.param(METHODS, name, *ranks, marks=unless_kind(name))
            for name in METHODS
            for ranks in ((2, 3), ((2, 2), (2, 2)))
        ),
        *(
            pytest.param(TRAINED, name, *ranks, marks=() if number % len(row) == turn else pytest.mark.slow)
            for number, name in enumerate(TRAINED)
            for row in CHANGES
            for turn, ranks in enumerate(row)
        ),
    ],
)
def test_nothing_is_lost(methods, name, before, after):
    """On other ranks, in other nodes, with other buckets."""
    method = partial(methods[name], **SMALL)
    momentum = method.keywords.get("momentum", 0.0)
    world, ranks = replicas(before, method)
    random_steps(world, ranks, range(5))
    states = states_of(ranks)
    given = copy.deepcopy(states)
    converted = reshard(iter(states))
    assert same(states, given)
    per_node, later = (size[1] if isinstance(size, tuple) else 1 for size in (before, after))
    nodes = world.size // per_node
    old = {key: sum(residuals(r)[key] for r in ranks) / nodes for key in residuals(ranks[0])}

    world, fresh = replicas(after, partial(methods[name], bucket_mb=0.02 if before == after else 0.08))
    for r in fresh:
        r.compression.load_state_dict(converted)
        assert r.compression.step == 5
        owed = r.compression.state_dict()["owed"]
        assert ("velocity" in owed) == bool(momentum)
        for kind, tensors in owed.items():
            found = {key: tensor for key, tensor in tensors.items() if tensor is not None}
            assert found or kind == "residual"
            for key, tensor in found.items():
                kept = [each for state in states if (each := state["owed"][kind][key]) is not None]
                assert len(kept) in {nodes, len(states)}
                torch.testing.assert_close(tensor, sum(kept) / len(kept), rtol=0, atol=2e-5)
    for begin in range(0, world.size, later):
        for key in old:  # of a node, one rank has it
            node = sum(residuals(r)[key] for r in fresh[begin : begin + later])
            torch.testing.assert_close(node, old[key], rtol=0, atol=2e-5)
    take_step = together if momentum or name in FORGETFUL else without_loss
    for step in range(20, 24):
        applied = take_step(world, fresh, [gradients(r.model, seed=1000 * step + r.rank) for r in fresh], shuffle=step)
        assert all(equal(applied[0], other) for other in applied[1:])


@pytest.mark.parametrize("name", ["iwp", "mipd"])
def test_floors_are_measured_in_the_first_step_after_a_conversion(name):
    """Else weights of 0 would have an infinite importance, or none, until the next step that measures them."""
    world, ranks = replicas(2, TRAINED[name])
    random_steps(world, ranks, range(5))
    converted = reshard(states_of(ranks))
    world, fresh = replicas(3, TRAINED[name])
    for r in fresh:
        r.compression.load_state_dict(converted)
    random_steps(world, fresh, [5])
    state = fresh[0].compression.state_dict()
    floors = {**state["shared"]["buckets"]["0"], **state["per_rank"]["buckets"]["0"]}["floors"]["wide.weight"]
    assert all(floor > 0 for floor in (floors.values() if isinstance(floors, dict) else [floors]))


def test_another_compressor_gets_what_fits_it():
    """Other options, and more compressed parameters; fewer would lose a residual. At density 1 the first average is all
    that was owed."""
    world, ranks = replicas(2, IWP, density=1 / 64, min_numel=5000)
    random_steps(world, ranks, range(3))
    converted = reshard(states_of(ranks))
    world, others = replicas(3, IWP, density=1.0, values="fp32", block_means=False)
    for r in others:
        r.compression.load_state_dict(converted)
    owed = {key: sum(residuals(r)[key] for r in ranks).float() / 2 for key in residuals(ranks[0])}
    applied = together(world, others, [[torch.zeros_like(p) for p in r.model.parameters()] for r in others])
    for (key, p), average in zip(ranks[0].model.named_parameters(), applied[0], strict=True):
        assert bool(owed[key].any()) == (p.dim() > 1 and p.numel() >= 5000)
        torch.testing.assert_close(average, owed[key], rtol=0, atol=1e-5)
    _, (fewer, *_) = replicas(3, IWP, min_numel=10**6)
    with pytest.raises(ValueError, match=r"^owed\.residual\.wide\.weight: is not compressed here, and its residual"):
        fewer.compression.load_state_dict(converted)
    _, (heavy, *_) = replicas(3, IWP, momentum=0.9)
    with pytest.raises(ValueError, match=r"^owed\.velocity: missing from the state"):
        heavy.compression.load_state_dict(converted)
    assert fewer.compression.step == heavy.compression.step == 0


def test_states_of_another_layout_raise_an_error_and_load_nothing():
    """Rank 0's state on all ranks would lose the residuals of the others."""
    world, ranks = replicas(2, IWP)
    random_steps(world, ranks, range(3))
    states = states_of(ranks)
    converts = r"hvd_compress.reshard\(states\) converts the states of all ranks"
    _, (nodes, _) = replicas((2, 1), IWP)
    nodes.compression.load_state_dict(states[0])  # nodes of one rank are none
    small = replicas(2, IWP, bucket_mb=0.02)[1][0]
    for other, state, says in (
        (ranks[1], states[0], r"owner: .* with {'rank': 0, .*DCPState; " + converts),
        (replicas(3, IWP)[1][1], states[1], r"owner: .* with {'rank': 1, 'ranks': 2, .* has {'rank': 1, 'ranks': 3, "),
        (replicas((1, 2), IWP)[1][0], states[0], r"owner: .* has {.*'ranks_of_a_node': 2}"),
        (small, states[0], r"shared.layout: .* bucket_mb and nodes .*, or " + converts),
    ):
        before = other.compression.state_dict()
        with pytest.raises(ValueError, match=says):
            other.compression.load_state_dict(state)
        assert same(other.compression.state_dict(), before)


def test_wrong_states_raise_an_error():
    world, ranks = replicas(3, IWP)
    random_steps(world, ranks, range(2))
    states = states_of(ranks)
    random_steps(world, ranks, range(2, 3))
    later, two = states_of(ranks), states_of(replicas(2, IWP)[1])

    def damaged(value, *path):
        state = part = copy.deepcopy(states[1])
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = value
        return [states[0], state, states[2]]

    wide = ("owed", "residual", "wide.weight")
    for wrong, says in (
        ([], r"needs the states of all  ?ranks, got none"),
        (states[:2], "needs the states of all 3 ranks, got 2"),
        ([*states, states[0]], r"states\[3\].owner: must be rank 3, got"),
        (states[::-1], r"states\[0\].owner: must be rank 0, got .*2"),
        ([states[0], two[1], states[2]], r"states\[1\].owner: must be a rank of the same job as .*'ranks': 3"),
        ([states[0], later[1], states[2]], "step: differs between rank 0 and rank 1"),
        ([reshard(states)] * 3, r"states\[0\].owner: must be rank 0, got None"),
        ([{"format": 5}], r"states\[0\]: must be a state_dict\(\) of this version"),
        ([None], r"states\[0\]: must be a state_dict\(\)"),
        (damaged("x", "owner", "ranks"), r"states\[1\].owner: must be rank 1, got"),
        (damaged({}, "owed"), r"^owed: the states have different items: \['residual', 'residual\."),
        (damaged(None, "owed", "residual"), r"^owed: must be dicts of tensors, got {'residual': None"),
        (damaged({}, *wide), r"^owed\.residual\.wide\.weight: must be a float tensor or None, got {}"),
        (damaged(torch.zeros(3), *wide), r"^owed\.residual\.wide\.weight: must have one shape .*, got .*\(3,\)"),
    ):
        with pytest.raises(ValueError, match=says):
            reshard(wrong)


@pytest.mark.parametrize("unsent", ["weights", "buffer"])
def test_local_steps_are_converted_after_finish_only(unsent):
    """Between exchanges each rank's parameters differ, and they are in the user's model."""
    options = dict(build=partial(SlimDP, density=1 / 8), unsent=unsent, outer_momentum=0.5)
    options["model"] = torch.nn.Linear(64, 64)
    world, group = workers(2, **options)
    world.run(lambda i: group[i].train(4))
    says = r"^local_steps.hash of the weights \(call finish\(\) before saving\): differs between rank 0 and rank 1"
    with pytest.raises(ValueError, match=says):
        reshard(states_of(group))
    world.run(lambda i: group[i].local.finish())
    state = reshard(states_of(group))
    held = torch.stack([worker.compression.residual("weight") for worker in group]).mean(0)
    assert held.any() == (unsent == "buffer")

    world, fresh = workers(3, **{**options, "model": group[0].model})
    for worker in fresh:
        worker.compression.load_state_dict(state)
        torch.testing.assert_close(worker.compression.residual("weight"), held, rtol=0, atol=1e-6)
        assert equal(worker.common(), group[0].common())
    world.run(lambda i: fresh[i].train(5, first=4))
    assert all(equal(fresh[0].common(), worker.common()) for worker in fresh)
    assert not equal(fresh[0].common(), group[0].common())


@pytest.mark.parametrize("name", TRAINED)
def test_after_an_elastic_reset_the_ranks_gather_and_convert_their_states(name):
    """A survivor with another rank, and new ones. Its own old state is refused then; before hvd.init(), when Horovod's
    elastic loop calls restore(), it loads."""
    world, ranks = replicas(2, TRAINED[name])
    random_steps(world, ranks, range(3))
    survivor = ranks[1]
    old = survivor.compression.state_dict()
    random_steps(world, ranks, range(3, 5))
    survivor.compression.load_state_dict(old)
    held = residuals(survivor)
    formed = ThreadWorld(3)
    survivor.move_to(formed, 0)
    everyone = [survivor, *(Rank(formed, i, survivor.model, TRAINED[name]) for i in (1, 2))]
    with pytest.raises(ValueError, match=r"^owner: the state was made with {'rank': 1, 'ranks': 2, .*hvd_compress."):
        survivor.compression.load_state_dict(old)
    state = reshard(states_of(everyone))
    for r in everyone:
        r.compression.load_state_dict(state)
        for key, residual in residuals(r).items():
            torch.testing.assert_close(residual, held[key] / 3, rtol=0, atol=1e-5)
    applied = random_steps(formed, everyone, range(20, 24))
    for other in applied[1:]:
        assert equal(applied[0], other)
    assert [r.compression.step for r in everyone] == [4, 4, 4]


def test_a_converted_state_that_is_loaded_after_an_elastic_reset_is_kept():
    """The survivor notices the new ranks when it loads, not at the next gradient, which would reset its step."""
    world, ranks = replicas(2, IWP)
    random_steps(world, ranks, range(3))
    state = reshard(states_of(ranks))
    formed = ThreadWorld(2)
    ranks[1].move_to(formed, 0)
    everyone = [ranks[1], Rank(formed, 1, ranks[1].model, IWP)]
    for r in everyone:
        r.compression.load_state_dict(state)
    random_steps(formed, everyone, range(3, 5))
    assert [r.compression.step for r in everyone] == [5, 5]
