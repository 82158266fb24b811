"""Ranks that are in different calls all raise an error that says who is where."""

from functools import partial

import pytest
import torch
from local_workers import CALL, DELAYED, SPARSE, Worker, on_both_hosts, same, workers
from methods import SMALL
from models import mixed_model

from hvd_compress import DCPState, NoCompression
from hvd_compress.carriers.threads import ThreadWorld

STEP, FINISH, TAKE, STATE = "step() {}", "finish()", "take_weights()", "state_dict()"


def finish(worker):
    worker.local.finish()


def finish_on_rank_0(worker):
    worker.train(5)
    if worker.rank == 0:
        finish(worker)
    worker.train(5)


def unequal_epochs(worker):
    for _ in range(3):
        worker.train(9 if worker.rank else 12)
        finish(worker)


def early_stop(worker):
    worker.train(6 if worker.rank else 12)
    finish(worker)


def weights_on_rank_1(worker):
    worker.train(5)
    if worker.rank == 1:
        worker.local.take_weights()
    finish(worker)


def another_period(worker):
    worker.train(4)
    worker.local.period = 8 if worker.rank else 4
    worker.train(12)


def saved_on_rank_0(worker):
    worker.train(4)
    if worker.rank == 0:
        worker.local.state_dict()
    finish(worker)


PERIOD = dict(period=4)
LATE = dict(period=4, delay=2)
WRONG = {
    "finish() on rank 0": (finish_on_rank_0, PERIOD, {0: FINISH, 1: STEP.format(8)}),
    "unequal epochs": (unequal_epochs, PERIOD, {0: STEP.format(12), 1: FINISH}),
    "early stop": (early_stop, PERIOD, {0: STEP.format(8), 1: FINISH}),
    "take_weights() on rank 1": (weights_on_rank_1, PERIOD, {0: FINISH, 1: TAKE}),
    "take_weights() on rank 1 in flight": (weights_on_rank_1, LATE, {0: FINISH, 1: TAKE}),
    "another period on rank 1": (another_period, PERIOD, {0: STEP.format(8), 1: STEP.format(12)}),
    "state_dict() in flight on rank 0": (saved_on_rank_0, LATE, {0: STATE, 1: FINISH}),
    "finish() on rank 0, delayed": (finish_on_rank_0, LATE, {0: FINISH, 1: STEP.format(8)}),
    "unequal epochs, in fragments": (unequal_epochs, DELAYED, {0: STEP.format(10), 1: FINISH}),
}


@pytest.mark.alternate("build")
@on_both_hosts
@pytest.mark.parametrize("build", [partial(SPARSE, **SMALL), NoCompression], ids=["sparse", "none"])
@pytest.mark.parametrize("name", WRONG)
def test_ranks_in_different_calls(name, build, ordered):
    wrong, options, calls = WRONG[name]
    world, group = workers(2, ordered=ordered, build=build, **options)

    def body(i):
        with pytest.raises(RuntimeError) as raised:
            wrong(group[i])
        return str(raised.value)

    errors = world.run(body)
    for rank, call in calls.items():
        assert all(f"rank {rank} in {call}" in error for error in errors), errors


def test_ranks_that_save_by_dcp_alone():
    world, group = workers(2, ordered=True)

    def body(i):
        group[i].train(3)
        if i == 0:
            DCPState(group[i].compression).state_dict()
        group[i].train(3, first=3)

    with pytest.raises(RuntimeError, match=r"rank 0 in DCPState\.state_dict\(\), rank 1 in step\(\) 6"):
        world.run(body)


def test_a_row_is_small():
    world, group = workers(3, period=2)
    world.run(lambda i: group[i].train(2))
    assert CALL * 2 == group[0].compression.stats()["last"]["budget_bytes"] <= 64 * 2


@on_both_hosts
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"period": 4}, "LocalSteps: period: 3 on rank 0; 4 on rank 1"),
        ({"unsent": "buffer"}, "unsent: weights on rank 0; buffer on rank 1"),
        ({"outer_lr": 0.5}, "outer_lr: 1 on rank 0; 0.5 on rank 1"),
        ({"restore_length": True}, "LocalSteps: restore_length: False on rank 0; True on rank 1"),
        ({"model": mixed_model(seed=1)}, "hash of the weights before the first step .were they broadcast"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_ranks_compare_their_options_in_the_first_step(options, says, ordered):
    """Not in the first exchange: a rank that is late has a whole period."""
    world = ThreadWorld(2, ordered=ordered)
    group = [Worker(world, 0, NoCompression), Worker(world, 1, NoCompression, **options)]
    with pytest.raises(RuntimeError, match=says):
        world.run(lambda i: group[i].train(1))


@on_both_hosts
def test_the_error_names_the_ranks_that_are_missing(ordered):
    world = ThreadWorld(3, timeout=0.5, ordered=ordered)
    group = [Worker(world, rank) for rank in range(3)]
    with pytest.raises(RuntimeError, match=r"rank 1 has not compared its options"):
        world.run(lambda i: i == 1 or group[i].train(1))


@on_both_hosts
def test_several_steps_of_the_optimizer_to_one_call(ordered):
    world, group = workers(2, ordered=ordered)

    def train(worker):
        for step in range(6):
            worker.local_step(2 * step)
            worker.local_step(2 * step + 1)
            worker.local.step()
        worker.local.finish()

    world.run(lambda i: train(group[i]))
    assert same(*group)


def test_one_rank_of_torch_exchanges_nothing():
    world, group = workers(1, ordered=True)
    worker = group[0]
    assert world.run(lambda i: worker.train(6)) == [[False, False, True] * 2]
    worker.local.finish(worker.model)
    assert worker.compression.stats()["steps"] == 0


def test_an_outer_optimizer_works_on_one_rank():
    """Nesterov momentum of the weights needs no other rank."""
    world, group = workers(1, ordered=True, build=NoCompression, outer_lr=0.7, outer_momentum=0.9)
    before = group[0].weights()
    world.run(lambda i: group[i].train(6))
    assert group[0].compression.stats()["steps"] == 2
    assert all(not torch.equal(*pair) for pair in zip(before, group[0].weights(), strict=True))


def test_steps_that_are_skipped_at_first_hide_no_gradients_that_are_averaged():
    """By a GradScaler: gradients were looked at before the first four exchanges only, also if there were none."""
    world, group = workers(2, period=1)
    for worker in group:
        worker.rank = 0
    for _ in range(4):
        world.run(lambda i: group[i].local.step())
    with pytest.warns(UserWarning, match="all ranks have the same gradients"):
        world.run(lambda i: group[i].train(1))
