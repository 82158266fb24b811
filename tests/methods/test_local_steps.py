"""Slim-DP's local mode: optimizer steps of each rank, and exchanges of parameters between them."""

import copy
import math
from functools import partial

import pytest
import torch
from harness import gradients, mixed_model, set_collectives

from hvd_compress import SlimDP
from hvd_compress.hosts.threads import ThreadWorld


class Worker:
    """A replica in local training, without Horovod's optimizer."""

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


def test_an_exchange_keeps_the_mean_of_the_parameters_and_the_unsent_differences():
    world, group = workers(3, density=1 / 16, values="fp32")
    alone = [Worker(ThreadWorld(1), rank, period=10**6) for rank in range(3)]
    world.run(lambda i: group[i].train(3))
    for worker in alone:
        worker.train(3)
    for number, (name, _) in enumerate(group[0].model.named_parameters()):
        free = [worker.weights()[number] for worker in alone]
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
def test_density_one_is_parameter_averaging(values):
    world, group = workers(2, density=1.0, values=values)
    world.run(lambda i: group[i].train(6))
    if values == "fp32":
        assert same(*group)
    world.run(lambda i: group[i].compression.finish())
    assert same(*group)


def test_a_checkpoint_resumes_bit_exactly():
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


def test_stats_count_the_dense_bytes_of_all_local_steps():
    world, group = workers(2, density=1 / 16, period=4)
    world.run(lambda i: group[i].train(4))
    last = group[0].compression.stats()["last"]
    numel = sum(p.numel() for p in group[0].model.parameters())
    assert last["dense_bytes"] == 4 * 4 * numel  # four steps, 2 (N - 1) / N times four bytes
    assert last["wire_ratio"] > 4 * 16


def test_a_new_rank_joins():
    """Elastic: one rank is in the middle of a period, the other is new; state.sync() has broadcast the weights."""
    world, group = workers(2, density=1 / 16)
    world.run(lambda i: group[i].train(4))
    anew = ThreadWorld(2, timeout=20)
    set_collectives(group[0].compression, anew.collectives(0))
    group[1] = Worker(anew, 1, density=1 / 16)
    group[1].model.load_state_dict(group[0].model.state_dict())
    anew.run(lambda i: group[i].train(7))
    assert group[0].compression.stats()["steps"] == group[1].compression.stats()["steps"] == 2
    anew.run(lambda i: group[i].compression.finish())
    assert same(*group)


@pytest.mark.parametrize("place", ["wide.weight", "wide.bias"])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38])
def test_an_infinity_reaches_every_rank_and_is_gone_once_the_parameters_are_restored(place, value):
    world, group = workers(2, density=1 / 16, period=1)
    world.run(lambda i: group[i].train(3))
    saved = [copy.deepcopy(worker.model.state_dict()) for worker in group]
    with torch.no_grad():
        group[1].model.get_parameter(place).view(-1)[30] = value
    world.run(lambda i: group[i].train(1, first=3))
    if not math.isfinite(value):
        assert not any(worker.model.get_parameter(place).isfinite().all() for worker in group)
    for worker, state in zip(group, saved, strict=True):
        worker.model.load_state_dict(state)
    world.run(lambda i: group[i].train(3, first=4))
    assert all(w.isfinite().all() and w.abs().max() < 1e3 for worker in group for w in worker.weights())
    world.run(lambda i: group[i].compression.finish())
    assert same(*group)


def test_using_one_mode_as_the_other_raises_an_error():
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
    with pytest.raises(ValueError, match=r"made_with.mode: the state was made with 'local'"):
        gradient.load_state_dict(local.state_dict())
    assert "local" in repr(local)
