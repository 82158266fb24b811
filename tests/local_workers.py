"""Local steps: ranks in threads that train, and what must hold of them."""

import copy
from functools import partial

import pytest
import torch
from harness import set_collectives
from models import equal, gradients, mixed_model

from hvd_compress import LocalSteps, TopK
from hvd_compress.carriers.threads import ThreadWorld

on_both_hosts = pytest.mark.parametrize("ordered", [False, True], ids=["horovod", "ddp"])
on_both_kinds = pytest.mark.parametrize("unsent", ["weights", "buffer"])
#: Bytes that a rank sends to each other one to compare their calls.
CALL = 32
SPARSE = partial(TopK, density=1 / 16)
#: Two buckets, one after the other; and what is exchanged arrives a step later.
IN_TURN = dict(period=4, fragments=2)
DELAYED = dict(period=4, fragments=2, delay=1)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)


class Worker:
    """A replica in local training."""

    def __init__(self, world, rank, build=SPARSE, model=None, optimizer=sgd, averaged=(), **options):
        self.model, self.rank = copy.deepcopy(model or mixed_model()), rank
        self.compression = build(self.model.named_parameters(), collectives=world.collectives(rank))
        given = optimizer(self.model.parameters())
        self.optimizers = given if isinstance(given, list) else [given]
        #: Those on averaged gradients, by their numbers.
        self.averaged = [self.optimizers[number] for number in averaged]
        options = {"period": 3, "unsent": "weights", "on_averaged_gradients": self.averaged, **options}
        self.local = LocalSteps(self.compression, given, **options)
        #: What the optimizers have made of the weights that all ranks began with.
        self.made = [p.detach().double() for p in self.model.parameters()]

    def local_step(self, step):
        before = self.weights()
        for p, grad in zip(self.model.parameters(), gradients(self.model, 100 * step + self.rank), strict=True):
            p.grad = grad
        for optimizer in self.optimizers:
            optimizer.step()
        for made, now, then in zip(self.made, self.weights(), before, strict=True):
            made += now.double() - then.double()

    def train(self, count, first=0):
        """Returns in which steps weights were exchanged."""
        exchanged = []
        for step in range(first, first + count):
            self.local_step(step)
            exchanged.append(self.local.step())
        return exchanged

    def saved(self):
        """What a user saves."""
        states = self.compression.state_dict(), [o.state_dict() for o in self.optimizers], self.model.state_dict()
        return copy.deepcopy(states)

    def resume(self, saved):
        compression, optimizers, model = saved
        self.model.load_state_dict(model)
        for optimizer, state in zip(self.optimizers, optimizers, strict=True):
            optimizer.load_state_dict(state)
        self.compression.load_state_dict(compression)

    def weights(self):
        return [p.detach().clone() for p in self.model.parameters()]

    def common(self):
        return [weight.common for weight in self.local._rounds._common.weights]

    @property
    def idle(self):
        """Whether nothing is in flight."""
        return not self.local._rounds._round._left

    def with_residuals(self):
        named = self.model.named_parameters()
        return [p.detach().double() + self.compression.residual(name) for name, p in named]


def workers(size, ordered=False, **options):
    world = ThreadWorld(size, ordered=ordered)
    return world, [Worker(world, rank, **options) for rank in range(size)]


def alone_at(rank, **options):
    """A worker that takes the steps of a rank, and exchanges nothing."""
    worker = Worker(ThreadWorld(1), 0, period=10**6, **options)
    worker.rank = rank
    return worker


def same(one, other):
    return equal(one.weights(), other.weights())


def mean(tensors_by_rank):
    return [torch.stack([t.double() for t in tensors]).mean(0) for tensors in zip(*tensors_by_rank, strict=True)]


def assert_nothing_is_lost(group, unsent, atol=1e-6):
    """The mean of the weights, or of the weights and the error-feedback buffers, is what the optimizers have made."""
    kept = (lambda w: w.weights()) if unsent == "weights" else (lambda w: w.with_residuals())
    torch.testing.assert_close(mean(map(kept, group)), mean(w.made for w in group), rtol=0, atol=atol)


def fail(worker, at):
    """Lets the ``at``-th collective from now on fail."""
    collectives, count = worker.compression.engine.collectives, iter(range(1000))
    start = collectives.start

    def failing(request, name):
        if next(count) == at:
            raise ConnectionError
        return start(request, name)

    collectives.start = failing


def in_a_new_world(group, ordered=False):
    """After a failure. Without a new generation: the ranks go on as they are."""
    world = ThreadWorld(len(group), ordered=ordered)
    for rank, worker in enumerate(group):
        set_collectives(worker.compression, world.collectives(rank))
        worker.compression.engine._generation = world
    return world


def resumes_bit_exactly(options, saved_after=7, steps=15):
    world, group = workers(2, **options)
    world.run(lambda i: group[i].train(saved_after))
    states = world.run(lambda i: group[i].saved())
    world.run(lambda i: group[i].train(steps - saved_after, first=saved_after))
    again, fresh = workers(2, **options)
    for worker, state in zip(fresh, states, strict=True):
        worker.resume(state)
    again.run(lambda i: fresh[i].train(steps - saved_after, first=saved_after))
    for one, other in zip(group, fresh, strict=True):
        assert same(one, other) and equal(one.common(), other.common())
