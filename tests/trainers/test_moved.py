"""A training knows by the optimizers' own steps whether weights have moved, whoever took them."""

import threading

import pytest
import torch
from harness import mixed_model
from optimizers import step

from hvd_compress import recipes
from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.trainers import training as module
from hvd_compress.trainers.training import Training

RANKS = 2


def of_rank(world, rank):
    training, model = Training(recipes.low_bit, {"period": 3, "collectives": world.collectives(rank)}), mixed_model()
    first, *others = model.parameters()
    training.begin(model, [torch.optim.SGD([first], lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=0.01)])
    return training, model, training.local


@pytest.fixture
def trainings(monkeypatch):
    """Of two ranks: a function that calls one with each rank's training, model, local steps and rank."""
    world, found, barrier = ThreadWorld(RANKS, timeout=20), [None] * RANKS, threading.Barrier(RANKS)
    ranks = threading.local()
    made = [of_rank(world, rank) for rank in range(RANKS)]

    def gather(value):
        found[ranks.rank] = value
        barrier.wait(20)
        seen = list(found)
        barrier.wait(20)
        return seen

    def run(function):
        def one(rank):
            ranks.rank = rank
            function(*made[rank], rank)

        world.run(one)

    monkeypatch.setattr(module.world, "gather", gather)
    run(lambda training, *_: training.average())
    return run, made


def raw(training, model, local, rank):
    step(model, training._optimizers, rank)


def raw_of_one_optimizer(training, model, local, rank):
    step(model, training._optimizers[:1], rank)


def raw_on_one_rank(training, model, local, rank):
    if rank:
        step(model, training._optimizers, 0)


def counted_and_skipped_on_one_rank(training, model, local, rank):
    if rank:
        step(model, training._optimizers, 0)
    training.count_step()


def raw_after_a_counted_step_and_an_average(training, model, local, rank):
    step(model, training._optimizers, rank)
    training.count_step()
    training.average()
    step(model, training._optimizers, 2 + rank)


def resumed(training, model, local, rank):
    step(model, training._optimizers, rank)
    training.count_step()
    state = training.state()
    training.average()
    training.load(1, lambda number: state)


MOVES = [
    raw,
    raw_of_one_optimizer,
    raw_on_one_rank,
    counted_and_skipped_on_one_rank,
    raw_after_a_counted_step_and_an_average,
    resumed,
]


@pytest.mark.parametrize("moves", MOVES, ids=lambda function: function.__name__)
def test_what_has_moved_the_weights_is_averaged(trainings, moves, monkeypatch):
    run, made = trainings
    monkeypatch.setattr(module.world, "place", lambda: (0, 1))
    run(moves)
    assert not torch.equal(*map(flat, made))
    run(lambda training, *_: training.average())
    assert torch.equal(*map(flat, made))


def test_what_has_not_moved_is_not_sent(trainings):
    run, made = trainings
    run(raw)
    run(lambda training, model, local, rank: local.finish(model))
    before, weights = sent(made), flat(made[0]).nbytes
    run(lambda training, *_: training.average())
    assert before > weights / 2 and sent(made) - before < weights / 10  # buffers may have changed


def test_a_step_that_is_not_counted_is_seen_until_it_is(trainings):
    run, made = trainings
    assert not made[0][0].stepped
    run(raw_of_one_optimizer)
    assert all(training.stepped for training, *_ in made)
    run(lambda training, *_: training.count_step())
    assert not any(training.stepped for training, *_ in made)


def flat(made):
    return torch.cat([p.detach().flatten() for p in made[1].parameters()])


def sent(made):
    return made[0][0].compression.stats()["total"]["dense_tensor_bytes"]


@pytest.mark.parametrize("moves", MOVES, ids=lambda function: function.__name__)
def test_the_end_averages_what_has_moved(trainings, moves, monkeypatch):
    """Also if only one rank has moved its own."""
    run, made = trainings
    monkeypatch.setattr(module.world, "place", lambda: (0, 1))
    run(moves)
    run(lambda training, *_: training.end())
    assert torch.equal(*map(flat, made))


def test_the_end_after_an_average_sends_no_weights(trainings):
    run, made = trainings
    run(raw)
    run(lambda training, *_: training.average())
    before = sent(made)
    run(lambda training, *_: training.end())
    weights = flat(made[0])
    assert sent(made) - before < weights.nbytes / 10 and torch.equal(weights, flat(made[1]))
