"""States of all ranks become one for another number of ranks; a state of another rank is refused."""

import copy
from functools import partial

import pytest
import torch
from harness import Rank, gradients, mixed_model, random_steps, replicas, residuals, together
from methods import FORGETFUL, METHODS, SMALL, TRAINED
from torch import Tensor

import hvd_compress
from hvd_compress import IWP
from hvd_compress.carriers.threads import ThreadWorld


def leaves(state, path=""):
    """The values in nested dicts, by path."""
    if not isinstance(state, dict):
        return {path: state}
    return {name: leaf for key, item in state.items() for name, leaf in leaves(item, f"{path}.{key}").items()}


def saved(ranks, folder):
    """Every rank's state, through a file."""
    for r in ranks:
        torch.save(r.compression.state_dict(), folder / f"{r.rank}.pt")
    return [torch.load(folder / f"{r.rank}.pt", weights_only=True) for r in ranks]


@pytest.mark.parametrize(
    ("methods", "name", "before", "after"),
    [
        *((METHODS, name, 2, 3) for name in METHODS),
        *((TRAINED, name, *ranks) for name in TRAINED for ranks in ((3, 2), (2, 2), (3, 1))),
        *((METHODS, name, (2, 2), (2, 2)) for name in METHODS),
        *((TRAINED, name, *ranks) for name in TRAINED for ranks in ((3, (2, 2)), ((2, 3), 2), ((2, 2), (2, 3)))),
    ],
)
def test_nothing_is_lost_on_another_number_of_ranks(methods, name, before, after, tmp_path):
    method = partial(methods[name], **SMALL)
    momentum = method.keywords.get("momentum", 0.0)
    world, ranks = replicas(before, method)
    random_steps(world, ranks, range(5))
    states = saved(ranks, tmp_path)
    everything = [leaves(state["per_rank"]) for state in states]
    converted = hvd_compress.reshard(iter(states))
    per_node, later = (size[1] if isinstance(size, tuple) else 1 for size in (before, after))
    nodes = world.size // per_node
    for path, mean in leaves(converted["per_rank"]).items():
        found = [torch.as_tensor(each[path]).double() for each in everything if path in each]
        assert len(found) == (nodes if path.startswith(".buckets") else world.size)
        want = sum(found) / len(found)
        torch.testing.assert_close(torch.as_tensor(mean).double(), want, rtol=1e-6, atol=1e-30)
        assert not isinstance(mean, Tensor) or mean.dtype == torch.float32
    velocities = [
        path for path in leaves(converted["per_rank"]) if ".velocity." in path and path.startswith(".buckets")
    ]
    assert bool(velocities) == bool(momentum)

    world, fresh = replicas(after, method)
    for r in fresh:
        r.compression.load_state_dict(converted)
        assert r.compression.step == 5
    old = {key: sum(residuals(r)[key] for r in ranks) / nodes for key in residuals(ranks[0])}
    for begin in range(0, world.size, later):
        for key in old:  # of a node, one rank has it
            node = sum(residuals(r)[key] for r in fresh[begin : begin + later])
            torch.testing.assert_close(node, old[key], rtol=0, atol=2e-5)
    for step in range(20, 24):
        held = [residuals(r) for r in fresh]
        grads = [gradients(r.model, seed=1000 * step + r.rank) for r in fresh]
        given = [[g.double().clone() for g in grad] for grad in grads]
        applied = together(world, fresh, grads, shuffle=step)
        for other in applied[1:]:
            assert all(torch.equal(a, b) for a, b in zip(applied[0], other, strict=True))
        if momentum or name in FORGETFUL:
            continue
        for number, (key, p) in enumerate(fresh[0].model.named_parameters()):
            if p.dim() > 1 and p.numel() >= 1024:
                given_in = later * sum(h[key] for h in held) + sum(g[number] for g in given)
                kept = world.size * applied[0][number].double() + later * sum(residuals(r)[key] for r in fresh)
                # An allreduce of float16 rounds the sum.
                rounds = name in ("iwp-fp16", "powersgd", "none-fp16")
                torch.testing.assert_close(kept, given_in, rtol=0, atol=5e-2 if rounds else 1e-4)


@pytest.mark.parametrize("after", [1, 3, 4])
def test_the_average_of_the_new_ranks_is_what_the_old_ranks_owed(after):
    """At density 1 everything is sent: the first average is the mean of the old residuals."""
    world, ranks = replicas(2, IWP, values="fp32", density=1 / 64)
    random_steps(world, ranks, range(5))
    owed = {key: sum(residuals(r)[key] for r in ranks) / 2 for key in residuals(ranks[0])}
    state = hvd_compress.reshard([r.compression.state_dict() for r in ranks])
    world, fresh = replicas(after, IWP, values="fp32", density=1.0)
    for r in fresh:
        r.compression.load_state_dict(state)
    applied = together(world, fresh, [[torch.zeros_like(p) for p in r.model.parameters()] for r in fresh])
    for (key, p), average in zip(ranks[0].model.named_parameters(), applied[0], strict=True):
        if p.dim() > 1 and p.numel() >= 1024:
            assert owed[key].norm() > 1
            torch.testing.assert_close(average.double(), owed[key], rtol=0, atol=1e-5)


def test_the_states_are_not_changed():
    world, ranks = replicas(2, IWP)
    random_steps(world, ranks, range(3))
    states = [r.compression.state_dict() for r in ranks]
    before = copy.deepcopy(states)
    hvd_compress.reshard(states)
    for one, other in zip(states, before, strict=True):
        assert hvd_compress.engine.state.same(one, other)


def test_a_state_of_other_buckets_is_converted_first():
    world, ranks = replicas(2, IWP)
    random_steps(world, ranks, range(3))
    states = [r.compression.state_dict() for r in ranks]
    _, others = replicas(2, IWP, bucket_mb=0.02)
    says = r"shared.layout: the state has other buckets: bucket_mb and nodes must be the same, or hvd_compress.reshard"
    with pytest.raises(ValueError, match=says):
        others[0].compression.load_state_dict(states[0])
    _, nodes = replicas((2, 1), IWP)
    nodes[0].compression.load_state_dict(states[0])  # nodes of one rank are none
    others[0].compression.load_state_dict(hvd_compress.reshard(states))
    held = residuals(others[0])
    for key, residual in held.items():
        torch.testing.assert_close(residual, sum(residuals(r)[key] for r in ranks) / 2, rtol=0, atol=1e-5)


def test_states_of_other_ranks_raise_an_error_and_load_nothing():
    """Rank 0's state on all ranks would lose the residuals of the others."""
    world, ranks = replicas(2, IWP)
    random_steps(world, ranks, range(3))
    states = [r.compression.state_dict() for r in ranks]
    _, others = replicas(3, IWP)
    converts = r"; hvd_compress.reshard\(states\) converts the states of all ranks"
    itself = r".* \(every rank must save and load its own; torch.distributed.checkpoint needs hvd_compress.DCPState\)$"
    first = f"owner: this is the state of rank 0 of 2, and this is rank 1 of 2{converts}"
    with pytest.raises(ValueError, match=first + itself):
        ranks[1].compression.load_state_dict(states[0])
    with pytest.raises(ValueError, match=f"owner: this is the state of rank 1 of 2, and this is rank 1 of 3{converts}"):
        others[1].compression.load_state_dict(states[1])
    assert others[1].compression.step == 0
    assert all(not held.any() for held in residuals(others[1]).values())
    ranks[1].compression.load_state_dict(states[1])


def test_wrong_states_raise_an_error():
    world, ranks = replicas(3, IWP)
    random_steps(world, ranks, range(2))
    states = [r.compression.state_dict() for r in ranks]
    random_steps(world, ranks, range(2, 3))
    later = [r.compression.state_dict() for r in ranks]
    _, others = replicas(2, IWP)
    two = [r.compression.state_dict() for r in others]

    def damaged(path, value):
        state = copy.deepcopy(states[1])
        *above, last = path.split("/")
        part = state
        for key in above:
            part = part[key]
        part[last] = value
        return [states[0], state, states[2]]

    for wrong, says in (
        ([], r"needs the states of all ranks, got none"),
        (states[:2], "needs the states of all 3 ranks, got 2"),
        ([*states, states[0]], r"states\[3\].owner: must be rank 3, got"),
        (states[::-1], r"states\[0\].owner: must be rank 0, got .*2"),
        ([states[0], states[0], states[2]], r"states\[1\].owner: must be rank 1"),
        ([states[0], two[1], states[2]], r"states\[1\].owner: must be a rank of the same job of 3"),
        ([states[0], later[1], states[2]], "step: differs between rank 0 and rank 1"),
        ([hvd_compress.reshard(states)] * 3, r"states\[0\].owner: must be rank 0, got None"),
        ([{"format": 2}], r"states\[0\]: must be a state_dict\(\) of this version"),
        ([None], r"states\[0\]: must be a state_dict\(\)"),
        (damaged("shared/buckets/0/shares/wide.weight", 1.0), "shares.wide.weight: differs between rank 0"),
        (damaged("shared/buckets/0/values/known", 1), "values.known: differs"),
        (
            damaged("per_rank/buckets/0/residual/wide.weight", {}),
            "residual.wide.weight: the states have different items",
        ),
        (
            damaged("per_rank/buckets/0/residual/wide.weight/entries", torch.zeros(3)),
            "wide.weight.entries: must be a number or",
        ),
        (damaged("per_rank/wire_stats/last/dense", "x"), "per_rank.wire_stats.last.dense: must be a number"),
        (damaged("per_rank", None), "per_rank: must be a number or a float tensor"),
        (damaged("shared", None), "shared: differs"),
    ):
        with pytest.raises(ValueError, match=says):
            hvd_compress.reshard(wrong)


@pytest.mark.parametrize("unsent", ["weights", "buffer"])
def test_local_steps_are_converted_after_finish_only(unsent):
    """Between exchanges each rank's parameters differ, and they are in the user's model."""
    torch.manual_seed(0)

    def steps(world, ranks, count, seed):
        def body(i):
            for step in range(count):
                generator = torch.Generator().manual_seed(seed + 10 * step + i)
                for p in ranks[i].model.parameters():
                    p.grad = torch.randn(p.shape, generator=generator)
                ranks[i].optimizer.step()
                ranks[i].local.step()

        world.run(body)

    def local(size, model):
        world, ranks = replicas(size, partial(hvd_compress.SlimDP, density=1 / 8), model=model)
        for r in ranks:
            r.optimizer = torch.optim.SGD(r.model.parameters(), lr=0.1)
            r.local = hvd_compress.LocalSteps(r.compression, r.optimizer, 3, unsent=unsent, outer_momentum=0.5)
        return world, ranks

    world, ranks = local(2, torch.nn.Linear(64, 64))
    steps(world, ranks, 4, 0)
    says = r"local_steps.hash of the weights \(call finish\(\) before saving\): differs between rank 0 and rank 1"
    with pytest.raises(ValueError, match=says):
        hvd_compress.reshard([r.compression.state_dict() for r in ranks])
    world.run(lambda i: ranks[i].local.finish())
    state = hvd_compress.reshard([r.compression.state_dict() for r in ranks])
    held = torch.stack([r.compression.residual("weight") for r in ranks]).mean(0)
    assert held.any() == (unsent == "buffer")

    world, fresh = local(3, ranks[0].model)
    for r in fresh:
        r.compression.load_state_dict(state)
        torch.testing.assert_close(r.compression.residual("weight"), held, rtol=0, atol=1e-6)
    steps(world, fresh, 5, 200)
    common = [r.local._rounds._common.weights[0].common for r in fresh]
    assert all(torch.equal(common[0], other) for other in common[1:])
    assert not torch.equal(common[0], ranks[0].model.weight)
    world.run(lambda i: fresh[i].local.finish())
    assert all(torch.equal(fresh[0].model.weight, r.model.weight) for r in fresh)


@pytest.mark.parametrize("name", TRAINED)
def test_after_an_elastic_reset_the_ranks_gather_and_convert_their_states(name):
    """A survivor with another rank, and a new one. Its own old state is refused then; before hvd.init(), when Horovod's
    elastic loop calls restore(), it loads."""
    world, ranks = replicas(2, TRAINED[name])
    random_steps(world, ranks, range(3))
    survivor = ranks[1]
    old = survivor.compression.state_dict()
    random_steps(world, ranks, range(3, 5))
    survivor.compression.load_state_dict(old)
    held = residuals(survivor)
    formed = ThreadWorld(3, timeout=20)
    survivor.move_to(formed, 0)
    everyone = [survivor, *(Rank(formed, i, survivor.model, TRAINED[name]) for i in (1, 2))]
    with pytest.raises(
        ValueError, match=r"this is the state of rank 1 of 2, and this is rank 0 of 3; hvd_compress.resh"
    ):
        survivor.compression.load_state_dict(old)
    state = hvd_compress.reshard([r.compression.state_dict() for r in everyone])
    assert state["step"] == 0
    for r in everyone:
        r.compression.load_state_dict(state)
        for key, residual in residuals(r).items():
            torch.testing.assert_close(residual, held[key] / 3, rtol=0, atol=1e-5)
    applied = random_steps(formed, everyone, range(20, 24))
    for other in applied[1:]:
        assert all(torch.equal(a, b) for a, b in zip(applied[0], other, strict=True))
    assert [r.compression.step for r in everyone] == [4, 4, 4]


def test_a_state_of_all_ranks_that_is_loaded_after_an_elastic_reset_is_kept():
    """The survivor notices the new ranks when it loads, not at the next gradient, which would reset its step."""
    world, ranks = replicas(2, IWP)
    random_steps(world, ranks, range(3))
    state = hvd_compress.reshard([r.compression.state_dict() for r in ranks])
    formed = ThreadWorld(2, timeout=20)
    ranks[1].move_to(formed, 0)
    everyone = [ranks[1], Rank(formed, 1, mixed_model(), IWP)]
    for r in everyone:
        r.compression.load_state_dict(state)
    random_steps(formed, everyone, range(3, 5))
    assert [r.compression.step for r in everyone] == [5, 5]
