"""Local steps that exchange one fragment after the other, and whose averages arrive later."""

import copy
import re
from functools import partial

import pytest
import torch
from harness import set_collectives
from local_workers import (
    CALL,
    DELAYED,
    IN_TURN,
    SPARSE,
    Worker,
    alone_at,
    assert_nothing_is_lost,
    fail,
    in_a_new_world,
    on_both_hosts,
    on_both_kinds,
    same,
    workers,
)
from methods import METHODS, SMALL
from models import equal, mixed_model

from hvd_compress import IWP, NoCompression, TopK
from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.local.averaged_steps import AveragedSteps
from hvd_compress.local.common_weights import CommonWeights
from hvd_compress.local.fragments import divided
from hvd_compress.local.round import Round

SMALL_SPARSE = partial(SPARSE, **SMALL)


def layers(count):
    """Layers of one size; with ``bucket_mb=0.02``, a bucket each."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(count)))


def names_of(fragment):
    return [weight.name for weight in fragment.weights]


# Fragments.


def test_buckets_and_what_lies_beside_them_are_divided():
    _, (worker,) = workers(1, build=SMALL_SPARSE, **IN_TURN)
    # Last layers first; a bias is with its layer.
    assert [names_of(fragment) for fragment in worker.local._rounds.turns.fragments] == [
        ["wide.weight", "wide.bias", "deep.weight"],
        ["first.weight", "first.bias", "norm.weight", "norm.bias", "conv.weight", "conv.bias"],
    ]


@pytest.mark.parametrize("sizes", [[1] * 7, [9, 1, 1, 1], [1, 1, 1, 9], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]], ids=str)
def test_sizes_are_divided_into_parts_of_about_the_same(sizes):
    for count in range(1, len(sizes) + 1):
        parts = divided(sizes, count)
        assert len(parts) == count and all(parts)
        assert [i for part in parts for i in part] == list(range(len(sizes)))
        largest = max(sum(sizes[i] for i in part) for part in parts)
        assert largest <= sum(sizes) / count + max(sizes)


def test_each_fragment_is_exchanged_once_in_a_period():
    world, group = workers(2, build=SMALL_SPARSE, **IN_TURN)
    first, second = group[0].local._rounds.turns.fragments
    before = group[0].weights()
    for changed in (first, second, first):
        assert world.run(lambda i: group[i].train(2)) == [[False, True]] * 2
        weights = group[0].local._rounds._common.weights
        moved = [w.name for w, b in zip(weights, before, strict=True) if not torch.equal(w.common, b)]
        assert moved == names_of(changed)
        before = copy.deepcopy(group[0].common())
    assert equal(group[0].common(), group[1].common())


def test_schedules_and_random_numbers_count_the_exchanges_of_each_bucket():
    seen = []
    world, group = workers(
        2,
        build=partial(IWP, density=lambda step: seen.append(step) or 1 / (8 + step), budget_interval=3, **SMALL),
        **IN_TURN,
    )
    world.run(lambda i: group[i].train(11))
    assert sorted(seen) == [0] * 4 + [1] * 4 + [2] * 2
    assert [work.step.number for work in group[0].compression.engine.works] == [2, 1]
    world.run(lambda i: group[i].local.finish())
    seen.clear()
    world.run(lambda i: group[i].train(4))
    assert sorted(seen) == [2, 2, 3, 3], "finish() does not change whose turn it is"


@pytest.mark.parametrize("build", [partial(SPARSE, bucket_mb=0.02), NoCompression], ids=["sparse", "none"])
def test_a_fragment_sends_its_share_of_the_bytes(build):
    """Peak bytes fall with the number of fragments, and the bytes of a period are those of one exchange at once."""
    totals, largest = [], []
    for fragments in (1, 2, 4):
        world, group = workers(2, build=build, model=layers(4), period=4, fragments=fragments)
        sent = [_train_and_count(world, group, step) for step in range(8)]
        largest.append(max(sent))
        stats = group[0].compression.stats()
        assert stats["steps"] == 2 * fragments
        totals.append(stats["total"]["wire_bytes"] - 2 * fragments * CALL)
        _finish(world, group)
        dense = 4 * sum(p.numel() for p in group[0].model.parameters())  # 2 (N - 1) / N times four bytes
        assert group[0].compression.stats()["total"]["dense_bytes"] == 8 * dense, "of each local step"
        assert equal(group[0].common(), group[1].common())
    assert len(set(totals)) == 1
    assert largest == [largest[0], largest[0] / 2, largest[0] / 4]


def _train_and_count(world, group, step):
    """The bytes of the last exchange, without those that compare the ranks' calls."""
    world.run(lambda i: group[i].train(1, first=step))
    return group[0].compression.stats()["last"]["wire_bytes"] - CALL


def _finish(world, group):
    world.run(lambda i: group[i].local.finish())


def test_too_few_buckets_raise_an_error():
    with pytest.raises(ValueError, match=r"3 fragments need as many buckets .* has 1: take fewer"):
        workers(1, model=mixed_model(), period=24, fragments=3)


def test_a_model_without_a_compressed_tensor():
    world, group = workers(2, build=partial(SPARSE, min_numel=10**6), **DELAYED)
    assert not group[0].compression.buckets
    world.run(lambda i: (group[i].train(9), group[i].local.finish()))
    assert same(*group)


def test_wrong_arguments_raise_an_error():
    for options, says in (
        ({"period": 4, "fragments": 3}, "period must be a multiple of fragments, got 4 and 3"),
        ({"period": 4, "fragments": 0}, "fragments must be an integer, at least 1, got 0"),
        ({"period": 4, "delay": 5}, "delay must lie in 0 to period / fragments = 4, got 5"),
        ({"period": 4, "delay": -1}, "delay must be an integer, at least 0, got -1"),
        ({**IN_TURN, "delay": 3}, "delay must lie in 0 to period / fragments = 2, got 3"),
    ):
        with pytest.raises(ValueError, match=says):
            workers(1, build=SMALL_SPARSE, **options)


def test_a_state_fits_the_same_fragments_only():
    _, (worker,) = workers(1, build=SMALL_SPARSE, **IN_TURN)
    _, (other,) = workers(1, build=SMALL_SPARSE, period=4)
    with pytest.raises(ValueError, match=r"local_steps\.fragments: the state was made with 2, this compressor has 1"):
        other.compression.load_state_dict(worker.compression.state_dict())


# Delay.


@on_both_hosts
@pytest.mark.parametrize("mode", [DELAYED, {**DELAYED, "delay": 2}, {"period": 4, "delay": 3}], ids=str)
def test_local_sgd_with_fragments_and_delay_by_hand(mode, ordered):
    """Everything is sent, so that common weights are means."""
    delay, count = mode["delay"], mode.get("fragments", 1)
    world, group = workers(2, build=partial(TopK, density=1.0, **SMALL), ordered=ordered, **mode)
    ended = world.run(lambda i: group[i].train(13))
    alone = [alone_at(rank) for rank in range(2)]
    numbers = [[weight.number for weight in fragment.weights] for fragment in group[0].local._rounds.turns.fragments]
    begun, turn = {}, 0
    for step in range(1, 14):
        for worker in alone:
            worker.train(1, first=step - 1)
        if step - delay in begun:
            fragment, before = begun[step - delay]
            assert ended[0][step - 1]
            for number in fragment:
                average = (before[0][number] + before[1][number]) / 2
                for worker, own in zip(alone, before, strict=True):
                    with torch.no_grad():
                        list(worker.model.parameters())[number].add_(average - own[number])
        if step % (4 // count) == 0:
            begun[step] = numbers[turn % count], [worker.weights() for worker in alone]
            turn += 1
    for worker, by_hand in zip(group, alone, strict=True):
        torch.testing.assert_close(worker.weights(), by_hand.weights(), rtol=1e-5, atol=1e-5)


@pytest.mark.alternate("ordered")
@on_both_hosts
@pytest.mark.parametrize("options", [{}, {"unsent": "buffer", "decay": 0.5}, {"outer_lr": 0.7, "outer_momentum": 0.5}])
@pytest.mark.parametrize("name", ["iwp", "fft", "mipd", "slimdp", "mp2-guessing", "powersgd", "none"])
def test_without_progress_in_flight_a_delay_changes_no_bit(name, options, ordered):
    """Methods that select by weights see the common weights."""
    results = []
    for delay in (0, 1):
        build = partial(METHODS[name], **SMALL)
        world, group = workers(2, build=build, ordered=ordered, period=3, delay=delay, **options)

        def body(i, group=group):
            for call in range(1, 14):
                if call % 3 != 1:  # not while something is in flight
                    group[i].local_step(call)
                group[i].local.step()

        world.run(body)
        results.append([*group[1].weights(), *group[1].common(), *group[1].with_residuals()])
    assert equal(*results)


@on_both_hosts
def test_parameters_keep_their_progress_and_do_not_change_early(ordered):
    world, group = workers(2, build=SMALL_SPARSE, ordered=ordered, period=8, delay=5)
    world.run(lambda i: group[i].train(8))
    common = copy.deepcopy(group[0].common())
    pieces = group[0].compression.buckets[0].pieces
    assert all(torch.equal(piece.weight(), common[piece.number]) for piece in pieces)
    for step in range(8, 12):
        world.run(lambda i, step=step: group[i].local_step(step))
        before = [worker.weights() for worker in group]
        assert not any(world.run(lambda i: group[i].local.step()))
        assert all(equal(worker.weights(), b) for worker, b in zip(group, before, strict=True))
    before = group[0].weights()
    assert all(world.run(lambda i: group[i].local.step()))
    assert not equal(group[0].weights(), before) and not equal(group[0].common(), common)
    assert all(torch.equal(piece.weight(), piece.parameter) for piece in pieces)
    assert_nothing_is_lost(group, "weights")


def test_a_call_resumes_what_is_in_flight_without_waiting():
    """Where collectives are matched by name, a rank may be ahead of another; where they are matched by the order of the
    calls, it starts one more collective of each exchange in each call, however fast they are."""
    world, group = workers(2, build=SMALL_SPARSE, period=4, delay=3)
    world.run(lambda i: group[i].train(7))
    for step in (7, 8, 9):  # only this rank: the averages are due in the next call
        assert group[0].train(1, first=step) == [False]
    world.run(lambda i: group[i].train(1, first=10) if i == 0 else group[i].train(4, first=7))
    assert equal(group[0].common(), group[1].common())

    world, group = workers(2, build=partial(METHODS["iwp"], **SMALL), ordered=True, period=4, delay=3)
    started = []
    for worker in group:
        start = worker.compression.engine.collectives.start

        def counting(request, name, start=start, rank=worker.rank):
            started.append((rank, name))
            return start(request, name)

        worker.compression.engine.collectives.start = counting
    world.run(lambda i: group[i].train(3))
    for step in (3, 4, 5):
        started.clear()
        world.run(lambda i, step=step: group[i].train(1, first=step))
        for rank in range(2):
            names = [name for r, name in started if r == rank and ".local." not in name and "compare" not in name]
            assert len(names) == len({name.rpartition(".")[0] for name in names}), "one of each exchange"
            assert names == [name for r, name in started if r == 0 and name in names]


@on_both_hosts
def test_saving_changes_nothing(ordered):
    """It waits for the messages in flight, which are applied when it is time."""
    options = dict(build=SMALL_SPARSE, ordered=ordered, period=4, delay=3)
    results = []
    for saves in (False, True):
        world, group = workers(2, **options)

        def body(i, group=group, saves=saves):
            for step in range(15):
                group[i].train(1, first=step)
                if saves:
                    before = group[i].weights()
                    group[i].saved()
                    assert equal(before, group[i].weights())

        world.run(body)
        results.append([*group[0].weights(), *group[0].common(), *group[0].with_residuals()])
    assert equal(*results)


@on_both_kinds
def test_finish_lands_what_is_in_flight(unsent):
    world, group = workers(2, build=SMALL_SPARSE, unsent=unsent, **DELAYED)
    world.run(lambda i: group[i].train(6))
    assert not group[0].idle
    world.run(lambda i: group[i].local.finish(group[i].model))
    assert group[0].idle and same(*group) and equal(group[0].weights(), group[0].common())
    assert_nothing_is_lost(group, unsent)
    assert world.run(lambda i: group[i].train(3, first=6)) == [[False, False, True]] * 2


@pytest.mark.alternate("ordered")
@on_both_hosts
@on_both_kinds
@pytest.mark.parametrize("name", ["iwp", "fft", "topk", "powersgd-fp32"])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_failure_in_flight_loses_nothing(name, stage, unsent, ordered):
    world, group = workers(2, build=partial(METHODS[name], **SMALL), unsent=unsent, ordered=ordered, period=4, delay=3)
    world.run(lambda i: group[i].train(3))
    common = copy.deepcopy(group[0].common())

    def body(i):
        group[i].local_step(3)
        fail(group[i], at=stage)
        with pytest.raises(ConnectionError):
            for step in range(4, 9):
                group[i].local.step()
                group[i].local_step(step)

    world.run(body)
    assert equal(common, group[0].common()) and group[0].idle
    assert_nothing_is_lost(group, unsent)
    exchanged = in_a_new_world(group, ordered).run(lambda i: group[i].train(4, first=9))
    assert exchanged == [[False, False, False, True]] * 2, "it begins at once"
    assert equal(group[0].common(), group[1].common())
    assert_nothing_is_lost(group, unsent)


@on_both_kinds
@pytest.mark.parametrize("all_ranks", [True, False])
def test_reset_waits_for_what_is_in_flight(unsent, all_ranks):
    """A message that was dropped on one rank would be another one's."""
    world, group = workers(2, build=SMALL_SPARSE, unsent=unsent, period=4, delay=3)
    world.run(lambda i: group[i].train(5))
    group[0].compression.discard_step()  # does nothing

    def go_on(rank):
        if all_ranks or rank == 0:
            group[rank].compression.reset()
        return group[rank].train(7, first=5)

    assert world.run(go_on) == [[False, True, False, False, False, True, False]] * 2
    assert equal(group[0].common(), group[1].common())
    if unsent == "weights" or group[0].idle:
        assert_nothing_is_lost(group, unsent)


@on_both_kinds
def test_a_new_rank_joins_while_an_exchange_is_in_flight(unsent):
    """Elastic: state.sync() has broadcast the weights, to which what was in flight must not be applied."""
    options = dict(build=SMALL_SPARSE, unsent=unsent, period=4, delay=3)
    world, group = workers(2, **options)
    world.run(lambda i: group[i].train(5))
    anew = ThreadWorld(2)
    set_collectives(group[0].compression, anew.collectives(0))
    group[1] = Worker(anew, 1, **options)
    group[1].model.load_state_dict(group[0].model.state_dict())
    before = group[0].weights()
    anew.run(lambda i: group[i].train(1))
    assert all(equal(worker.common(), before) for worker in group) and group[0].idle
    assert anew.run(lambda i: group[i].train(6, first=1)) == [[False] * 5 + [True]] * 2
    assert equal(group[0].common(), group[1].common())
    anew.run(lambda i: group[i].local.finish())
    assert same(*group)


def test_loading_forgets_what_is_in_flight():
    """Also after the model's state was loaded."""
    world, group = workers(2, build=SMALL_SPARSE, **DELAYED)
    world.run(lambda i: group[i].train(3))
    states = world.run(lambda i: group[i].saved())
    world.run(lambda i: group[i].train(3, first=3))
    assert not group[0].idle
    world.run(lambda i: group[i].resume(states[i]))
    for worker, state in zip(group, states, strict=True):
        assert equal(worker.weights(), [state[2][name] for name, _ in worker.model.named_parameters()])
    world.run(lambda i: group[i].train(3, first=3))
    again, others = workers(2, build=SMALL_SPARSE, **DELAYED)
    again.run(lambda i: others[i].train(6))
    assert same(group[0], others[0])


def test_a_damaged_state_in_flight_is_refused():
    world, group = workers(2, build=SMALL_SPARSE, period=4, delay=3)
    world.run(lambda i: group[i].train(5))
    good = world.run(lambda i: group[i].compression.state_dict())[0]
    for path, value, says in (
        (["calls left"], 4, "in_flight.calls left: must lie in 0 to 3, got 4"),
        (["averages", "wide.bias"], torch.zeros(46), "in_flight.averages.wide.bias: must be a float32 tensor of shape"),
        (["before", "wide.bias"], torch.full((47,), torch.nan), "in_flight.before.wide.bias: must be finite"),
    ):
        state = copy.deepcopy(good)
        *folders, name = path
        place = state["local_steps"]["in_flight"]
        for folder in folders:
            place = place[folder]
        place[name] = value
        with pytest.raises(ValueError, match=re.escape(says)):
            group[0].compression.load_state_dict(state)
    group[0].compression.load_state_dict(good)


@on_both_kinds
def test_progress_of_16_bit_parameters_is_kept(unsent):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).bfloat16()
    world, group = workers(2, build=partial(TopK, density=1.0), model=model, unsent=unsent, period=2, delay=1)
    world.run(lambda i: group[i].train(9))
    assert group[0].idle and group[0].common()[0].dtype == torch.float32
    assert equal(group[0].common(), group[1].common())
    assert_nothing_is_lost(group, unsent, atol=0.1)


def test_weights_that_were_replaced_before_state_dict_are_still_an_error():
    world, group = workers(2, ordered=True, period=4, delay=2)

    def train(worker):
        worker.train(5)
        with torch.no_grad():
            for p in worker.model.parameters():
                p.add_(1.0)
        worker.local.state_dict()
        worker.train(2, first=5)

    with pytest.raises(RuntimeError, match="the weights have changed"):
        world.run(lambda i: train(group[i]))


def out_of_memory(*_):
    raise MemoryError


def test_a_round_that_cannot_begin_is_due_in_the_next_call(monkeypatch):
    _, (worker,) = workers(1, period=3, outer_lr=0.7)
    worker.train(2)
    with monkeypatch.context() as failing:
        failing.setattr(CommonWeights, "progress", out_of_memory)
        with pytest.raises(MemoryError):
            worker.train(1, first=2)
    assert worker.train(1, first=3) == [True]


@pytest.mark.parametrize("then", ["take_weights", "load"])
@pytest.mark.parametrize(
    "owner, place, in_finish",
    [
        *(
            (owner, place, False)
            for owner, place in [(CommonWeights, "move"), (AveragedSteps, "step"), (Round, "_write")]
        ),
        *((owner, place, True) for owner, place in [(CommonWeights, "replace"), (AveragedSteps, "step")]),
    ],
)
def test_after_a_round_that_was_interrupted_while_it_was_applied_all_calls_are_an_error(
    owner, place, in_finish, then, monkeypatch
):
    """The other ranks have its averages, and this one would train on with other common weights, or save them."""

    def interrupted(*_):
        raise KeyboardInterrupt

    _, (worker,) = workers(1, period=3, outer_lr=0.7)
    saved = worker.saved()
    worker.train(2)
    with monkeypatch.context() as failing:
        failing.setattr(owner, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            worker.local.finish() if in_finish else worker.train(1, first=2)
    local, compression = worker.local, worker.compression
    calls = [local.step, local.finish, local.end, local.state_dict, compression.state_dict]
    for call in [*calls, lambda: local.finish(worker.model), lambda: local.finish(moved_only=True), local.step]:
        with pytest.raises(RuntimeError, match="while its averages were applied"):
            call()
    if then == "load":
        worker.resume(saved)
    else:
        worker.local.take_weights()
    assert worker.train(3, first=6) == [False, False, True]
    assert worker.saved()
    local.end()
