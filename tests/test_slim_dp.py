"""Slim-DP: core and explorer; and the local mode."""

import copy
from functools import partial
from itertools import pairwise

import pytest
import torch
from harness import Scheduled, gradients, mixed_model, random_steps, replicas

from hvd_compress import SlimDP
from hvd_compress.hosts.threads import ThreadWorld
from hvd_compress.reference import BLOCK, positions


def sent(rank, number=0):
    """Where the last step's entries of a bucket lie."""
    selection = rank.compression._plans[number].selection
    return set(positions(selection.picks, selection.rows, selection.phase).tolist())


def steps(core, count, density=8 / 256, **options):
    """The entries of each step, and a rank; one bucket of whole blocks."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False)
    world, ranks = replicas(2, partial(SlimDP, density=density, core=core, **options), model=model)
    seen = []
    for step in range(count):
        random_steps(world, ranks, [step])
        assert sent(ranks[0]) == sent(ranks[1]), "the ranks have to choose all_equal"
        seen.append(sent(ranks[0]))
    return seen, ranks[0]


def test_the_core_stays_and_the_explorer_moves():
    seen, rank = steps(core=0.5, count=10, reselect=10)
    assert all(len(one) == 8 * 16 for one in seen)
    core = set.intersection(*seen)
    # The weights alone count in step 0: of every block the four largest.
    largest = rank.model.weight.detach().view(16, BLOCK).abs().topk(4).indices + torch.arange(16)[:, None] * BLOCK
    assert core == set(largest.flatten().tolist())
    explored = [one - core for one in seen]
    assert all(len(a & b) < 12 for a, b in pairwise(explored)), "64 of 4032 meet by chance"


def test_only_core_and_only_explorer():
    seen, _ = steps(core=1.0, count=6, reselect=3)
    assert seen[0] == seen[1] == seen[2] and seen[3] == seen[4] == seen[5]
    seen, _ = steps(core=0.0, count=200)
    assert len(set.union(*seen)) > 4080, "by lot, everything has its turn"


@pytest.mark.parametrize("density", [1 / 500, 5.5 / 256])
def test_a_core_alone_stays_whatever_the_density(density):
    seen, _ = steps(core=1.0, count=5, density=density, reselect=5)
    assert all(one == seen[0] for one in seen)


def test_the_core_follows_the_gradients():
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False)
    build = partial(SlimDP, density=64 / 256, core=0.5, reselect=4, gradient_weight=1000.0, momentum=0.0)
    world, ranks = replicas(2, build, model=model)
    hot = torch.zeros(64, 64)
    hot.view(16, BLOCK)[:, ::8] = 1.0
    for _ in range(60):
        world.run(lambda i: ranks[i].exchange([hot * (1.0 + i)]))
    core = (ranks[0].compression.buckets[0].state["chance"] > 1.0).view(16, BLOCK).nonzero()
    assert set((core[:, 1] % 8).tolist()) == {0}
    assert len(core) == 16 * 32


def test_no_index_travels():
    world, ranks = replicas(3, partial(SlimDP, density=1 / 32))
    random_steps(world, ranks, range(3))
    last = ranks[0].compression.stats()["last"]
    assert last["indices_bytes"] == 0.0 and last["values_bytes"] > 0.0


def test_a_density_that_falls_from_one_finds_an_explorer():
    falls = Scheduled(lambda step: 1.0 if step < 3 else 1 / 32)
    world, ranks = replicas(2, partial(SlimDP, density=falls, reselect=50))
    random_steps(world, ranks, range(4))
    offsets = ranks[0].compression._plans[0].selection.picks
    assert int(offsets.max()) > 100, "by lot, not the first of every block"


# Local steps.


class Worker:
    """A replica that trains by itself, without Horovod's optimizer."""

    def __init__(self, world, rank, model=None, **options):
        self.model, self.rank = model or mixed_model(), rank
        options = {"mode": "local", "period": 3, **options}
        self.compression = SlimDP(self.model.named_parameters(), collectives=world.collectives(rank), **options)
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.5)
        self.optimizer = self.compression.wrap(sgd)
        assert self.optimizer is sgd

    def train(self, count, first=0):
        for step in range(first, first + count):
            for p, grad in zip(self.model.parameters(), gradients(self.model, 100 * step + self.rank), strict=True):
                p.grad = grad
            self.optimizer.step()

    def weights(self):
        return [p.detach().clone() for p in self.model.parameters()]


def workers(size, **options):
    world = ThreadWorld(size, timeout=20)
    return world, [Worker(world, rank, **options) for rank in range(size)]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.weights(), other.weights(), strict=True))


def test_local_steps_keep_the_mean_and_what_is_not_sent_drifts():
    world, group = workers(3, density=1 / 16, values="fp32")
    loners = [Worker(ThreadWorld(1), rank, period=10**6) for rank in range(3)]
    world.run(lambda i: group[i].train(3))
    for loner in loners:
        loner.train(3)
    for number, (name, _) in enumerate(group[0].model.named_parameters()):
        free = [loner.weights()[number] for loner in loners]
        now = [worker.weights()[number] for worker in group]
        mean = torch.stack(free).mean(0)
        torch.testing.assert_close(torch.stack(now).mean(0), mean, rtol=0, atol=1e-5)
        agreed = torch.stack([w == now[0] for w in now]).all(0)
        torch.testing.assert_close(now[0][agreed], mean[agreed], rtol=0, atol=1e-5)
        share = float(agreed.float().mean())
        if mean.dim() < 2 or mean.numel() < 1024:
            assert share == 1.0, name
        else:
            assert 0.05 < share < 0.08, name
            for w, f in zip(now, free, strict=True):
                torch.testing.assert_close(w[~agreed], f[~agreed], rtol=0, atol=1e-6)
    world.run(lambda i: group[i].compression.finish())
    assert same(group[0], group[1]) and same(group[1], group[2])


@pytest.mark.parametrize("values", ["fp32", "lanes4"])
def test_local_steps_of_everything_are_parameter_averaging(values):
    world, group = workers(2, density=1.0, values=values)
    world.run(lambda i: group[i].train(6))
    if values == "fp32":
        assert same(*group)
    world.run(lambda i: group[i].compression.finish())
    assert same(*group)


def test_local_steps_resume_from_a_checkpoint():
    world, group = workers(2, density=1 / 16)
    world.run(lambda i: group[i].train(7))
    states = copy.deepcopy(
        [(w.compression.state_dict(), w.optimizer.state_dict(), w.model.state_dict()) for w in group]
    )
    world.run(lambda i: group[i].train(8, first=7))
    again, fresh = workers(2, density=1 / 16)
    for worker, (mine, optimizer, model) in zip(fresh, states, strict=True):
        worker.model.load_state_dict(model)
        worker.optimizer.load_state_dict(optimizer)
        worker.compression.load_state_dict(mine)
    again.run(lambda i: fresh[i].train(8, first=7))
    assert same(group[0], fresh[0]) and same(group[1], fresh[1])


def test_local_steps_count_what_they_save():
    world, group = workers(2, density=1 / 16, period=4)
    world.run(lambda i: group[i].train(4))
    last = group[0].compression.stats()["last"]
    numel = sum(p.numel() for p in group[0].model.parameters())
    assert last["dense_bytes"] == 4 * 4 * numel  # four steps, 2 (N - 1) / N times four bytes
    assert last["wire_ratio"] > 4 * 16


def test_a_fresh_rank_joins():
    """Elastic: one rank survives in the middle of a period, one is new; state.sync() has broadcast the weights."""
    world, group = workers(2, density=1 / 16)
    world.run(lambda i: group[i].train(4))
    anew = ThreadWorld(2, timeout=20)
    group[0].compression.engine.collectives = group[0].compression.engine.exchanges.engine.collectives = anew.collectives(0)
    group[1] = Worker(anew, 1, density=1 / 16)
    group[1].model.load_state_dict(group[0].model.state_dict())
    anew.run(lambda i: group[i].train(7))
    assert group[0].compression.stats()["steps"] == group[1].compression.stats()["steps"] == 2
    anew.run(lambda i: group[i].compression.finish())
    assert same(*group)


def test_an_infinity_reaches_every_rank():
    world, group = workers(2, density=1 / 16)
    world.run(lambda i: group[i].train(3))
    with torch.no_grad():
        group[1].model.wide.weight[3, 4] = float("inf")
    world.run(lambda i: group[i].train(3, first=3))
    assert all(not worker.model.wide.weight.isfinite().all() for worker in group)


def test_the_modes_are_told_apart():
    model = mixed_model()
    make = partial(SlimDP, collectives=ThreadWorld(1).collectives(0))
    local, gradient = (make(model.named_parameters(), mode=mode) for mode in ("local", "gradient"))
    model.wide.weight.grad = torch.zeros_like(model.wide.weight)
    with pytest.raises(RuntimeError, match=r"use compression.wrap\(optimizer\) instead"):
        local.compress(model.wide.weight.grad)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match='for mode="local"'):
        gradient.wrap(optimizer)
    with pytest.raises(ValueError, match="stays in the optimizer"):
        local.take_momentum(optimizer)
    with pytest.raises(ValueError, match="holds none"):
        local.wrap(torch.optim.SGD(mixed_model().parameters(), lr=0.1))
    local.wrap(optimizer)
    with pytest.raises(ValueError, match="wraps an optimizer already"):
        local.wrap(optimizer)
    with pytest.raises(ValueError, match="another mode"):
        gradient.load_state_dict(local.state_dict())
    assert "local, every 1 steps" in repr(local)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"core": 1.5}, "core must lie in"),
        ({"reselect": 0}, "reselect must be at least 1"),
        ({"gradient_weight": -1.0}, "gradient_weight must not be negative"),
        ({"smoothing": 1.0}, "smoothing must lie in"),
        ({"mode": "remote"}, "mode must be gradient or local"),
        ({"period": 2}, "period must be at least 1"),
        ({"mode": "local", "dense_values": "fp16"}, "leave dense_values out"),
        ({"mode": "local", "momentum": 0.9}, "momentum and grad_scaler are the optimizer's business"),
    ],
)
def test_wrong_arguments_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        replicas(1, partial(SlimDP, **options))
