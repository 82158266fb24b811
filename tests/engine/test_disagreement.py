"""Ranks that differ in method, options, seed, step or weights raise an error, and do not hang."""

from contextlib import suppress
from functools import partial

import pytest
import torch
from harness import HOSTS, Rank, random_steps, replicas, residuals, sgd
from hypothesis import given
from hypothesis import strategies as st
from methods import METHODS
from models import equal, gradients, mixed_model

from hvd_compress import IWP, TopK
from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.codecs import Lanes
from hvd_compress.engine.agreement import LIMIT, Agreement, all_equal
from hvd_compress.engine.bucket import make_buckets
from hvd_compress.engine.work import Step
from hvd_compress.schedule import diminishing
from hvd_compress.selection.base import Scoring
from hvd_compress.selection.deciders import Shared
from hvd_compress.selection.idle import Idle
from hvd_compress.selection.pickers import Everything


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "step: 0 on ranks 0, 1; 3 on rank 2"),
        ({"seed": 1}, "seed: 0 on ranks 0, 1; 1 on rank 2"),
        ({"density": 1.0}, "density: 0.03125 on ranks 0, 1; 1 on rank 2"),
        ({"density": diminishing(0.1, lambda: 0.1, 0.1)}, "density: 0.03125 on ranks 0, 1; diminishing.* on rank 2"),
        ({"min_numel": 16}, "min_numel: 1024 on ranks 0, 1; 16 on rank 2"),
        ({"momentum": 0.5}, "momentum: 0 on ranks 0, 1; 0.5 on rank 2"),
        ({"block_means": False}, "block_means: True on ranks 0, 1; False on rank 2"),
        ({"values": Lanes(4, stochastic=False)}, "values: Lanes.*stochastic=True. on ranks 0, 1; .*=False. on rank 2"),
        ({"grad_scaler": torch.amp.GradScaler("cpu")}, "grad_scaler: False on ranks 0, 1; True on rank 2"),
    ],
    ids=lambda value: next(iter(value), "step") if isinstance(value, dict) else "",
)
def test_all_ranks_say_which_options_differ_and_where(options, message, host):
    """Otherwise ranks would wait for each other, or every rank would silently get another gradient."""
    world, ranks = replicas(2, IWP, host=host)
    world = ThreadWorld(3, ordered=host == "ddp")
    ranks = [type(ranks[0])(world, r, mixed_model(), IWP, **(options if r == 2 else {})) for r in range(3)]
    if not options:
        ranks[2].compression.engine.step = 3
    assert_all_raise(world, ranks, message)


def assert_all_raise(world, ranks, message):
    """Every rank raises the same error, from its first gradient."""

    def step(i):
        with pytest.raises(RuntimeError, match="must not:(.|\n)*" + message) as error:
            ranks[i].exchange(gradients(ranks[i].model, seed=i), shuffle=0)
        return str(error.value)

    assert len(set(world.run(step))) == 1


@pytest.mark.parametrize("other", ["fft", "mipd", "topk", "terngrad", "qsgd", "powersgd", "slimdp"])
def test_ranks_with_another_method_raise_an_error(other):
    world = ThreadWorld(2)
    ranks = [Rank(world, rank, mixed_model(), METHODS[name]) for rank, name in enumerate(("iwp", other))]
    assert_all_raise(world, ranks, "method: IWP on rank 0; .* on rank 1")


def frozen_bias(model):
    model.deep.weight.requires_grad_(False)


def other_order(model):
    model.first, model.wide = model.wide, model.first


def another_name(model):
    model.renamed = model.wide
    del model.wide


def memory_format(model):
    model.conv.to(memory_format=torch.contiguous_format)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (frozen_bias, "parameter deep.weight: number .*, trained, .* on rank 0; .*, frozen, .* on rank 1"),
        (other_order, "parameter first.weight: number 0, .* on rank 0; number"),
        (another_name, "parameter renamed.weight: missing on rank 0; number .* on rank 1"),
        (memory_format, "parameter conv.weight: .* strides .* on rank 0; .* strides .* on rank 1"),
    ],
)
def test_ranks_with_other_parameters_raise_an_error(change, message):
    world = ThreadWorld(2)
    models = [mixed_model(), mixed_model()]
    change(models[1])
    ranks = [Rank(world, rank, model, IWP) for rank, model in enumerate(models)]
    assert_all_raise(world, ranks, message)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"explore": 1}, {"explore": 1.0}),
        ({"values": "lanes4"}, {"values": Lanes(4)}),
        ({"start_timeout": 5.0}, {"process_set": None}),
        ({"density": diminishing(1 / 32, lambda: 0.1, 0.1)}, {"density": diminishing(1 / 32, lambda: 0.2, 0.2)}),
        ({"seed": 10**400}, {"seed": 10**400}),
    ],
    ids=str,
)
def test_equal_options_may_be_spelled_differently(one, other):
    world = ThreadWorld(2)
    ranks = [Rank(world, rank, mixed_model(), IWP, **given) for rank, given in enumerate((one, other))]
    random_steps(world, ranks, range(2))


def test_ranks_with_other_weights_raise_an_error():
    """MIPD selects by the weights: if they were not broadcast, ranks would average different entries."""
    world = ThreadWorld(2)
    ranks = [Rank(world, rank, mixed_model(seed=rank), METHODS["mipd"]) for rank in range(2)]
    with pytest.raises(RuntimeError, match="were the parameters broadcast"):
        random_steps(world, ranks, range(1))


@pytest.mark.parametrize("missing", ["compressor", "load_state_dict"])
def test_a_rank_that_does_not_compare_ends_the_others_waiting(missing):
    world, ranks = replicas(2, partial(IWP, start_timeout=0.5))
    if missing == "load_state_dict":
        random_steps(world, ranks, range(2))
        ranks[0].compression.load_state_dict(ranks[0].compression.state_dict())
    grads = gradients(ranks[0].model, seed=0)
    with pytest.raises(RuntimeError, match="rank 1 has not compared its options"):
        ranks[0].exchange(grads)


@pytest.mark.parametrize("everywhere", [True, False])
def test_ranks_compare_again_after_a_new_parameter_group(everywhere):
    """Ranks without it would wait for the others."""
    world, ranks = replicas(2, partial(IWP, start_timeout=0.5))
    optimizers = sgd(ranks)
    random_steps(world, ranks, [0], optimizers=optimizers)
    for rank, optimizer in enumerate(optimizers):
        if everywhere or rank == 0:
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
        optimizer.step()
    if everywhere:
        random_steps(world, ranks, [1])
        return
    with pytest.raises(RuntimeError, match="rank 1 has not compared its options"):
        ranks[0].exchange(gradients(ranks[0].model, seed=0))


def test_ranks_compare_again_after_loading():
    world, ranks = replicas(2, IWP)
    states = [r.compression.state_dict() for r in ranks]
    random_steps(world, ranks, range(3))
    states[1] = ranks[1].compression.state_dict()
    for rank, state in zip(ranks, states, strict=True):
        rank.compression.load_state_dict(state)
    assert_all_raise(world, ranks, "step: 0 on rank 0; 3 on rank 1")


@pytest.mark.parametrize("name", ["iwp", "mipd", "topk"])
def test_an_option_that_one_rank_changes_between_steps_raises_an_error(name):
    """Later steps compare by hashes, which selections by leaders, by shared scores and by each rank send."""
    world, ranks = replicas(2, METHODS[name])
    random_steps(world, ranks, range(2))
    ranks[1].compression._shown["density"] = 0.5
    with pytest.raises(RuntimeError, match="disagree"):
        random_steps(world, ranks, [2])


@pytest.mark.parametrize("name", ["quantized", "qsgd", "terngrad"])
def test_ranks_in_different_steps_raise_an_error_where_nothing_is_selected(name):
    world, ranks = replicas(2, METHODS[name])
    random_steps(world, ranks, range(2))
    ranks[1].compression.engine.step += 1
    before = [residuals(rank) for rank in ranks]
    with pytest.raises(RuntimeError, match="disagree"):
        random_steps(world, ranks, [2])
    for rank, held in zip(ranks, before, strict=True):
        rank.compression.reset()
        assert name != "quantized" or not equal(held.values(), residuals(rank).values())  # the gradients stay


def test_a_disagreement_is_remembered_until_it_is_checked():
    """On a GPU it is not checked in every step."""
    (bucket,) = make_buckets([(0, "w", torch.nn.Parameter(torch.zeros(512)))], 2**20)
    agreement = Agreement(bucket.device)
    decider = Shared(Everything(bucket), Idle(bucket, silences=False), agreement)

    def step(number, other_digest):
        begun = Step(number, 0, 2, 1.0, 0, 0)
        agreement.begin(begun)
        agreement._looks = number == 2
        decider.begin(begun)
        exchange = decider.agree(Scoring(), ())
        ours = next(exchange).tensor
        with suppress(StopIteration):
            exchange.send(torch.cat([ours, ours + other_digest]))

    step(0, other_digest=0)
    assert not agreement._differ
    step(1, other_digest=1)
    assert agreement._differ
    with pytest.raises(RuntimeError, match="disagree"):
        step(2, other_digest=0)


@given(numbers=st.lists(st.integers(0, LIMIT - 1), min_size=1, max_size=40))
def test_all_equal_is_true_if_and_only_if_all_ranks_have_the_same_number(numbers):
    """The second number is the same on all ranks: the largest allowed."""
    exchange = all_equal(torch.tensor([numbers[0], LIMIT - 1]))
    rows = torch.cat([next(all_equal(torch.tensor([number, LIMIT - 1]))).tensor for number in numbers])
    next(exchange)
    with pytest.raises(StopIteration) as result:
        exchange.send(rows)
    assert result.value.value.tolist() == [len(set(numbers)) == 1, True]


@pytest.mark.parametrize("build", [partial(TopK, density=1.0), partial(IWP, density=1.0, values="fp32")])
def test_ranks_begin_and_end_the_steps_of_several_compressors_in_different_orders(build):
    """As Horovod allows: compress() for all of them, then decompress(). One is never used."""
    world = ThreadWorld(2)

    def body(rank):
        models = [torch.nn.Linear(64, 64, bias=False) for _ in range(3)]
        compressions = [build(m.named_parameters(), collectives=world.collectives(rank)) for m in models]
        order, contexts, averages = [0, 2] if rank == 0 else [2, 0], {}, {}
        for i in order:
            models[i].weight.grad = torch.full((64, 64), float(10 * i + rank))
            contexts[i] = compressions[i].compress(models[i].weight.grad)
        for i in order[::-1]:
            averages[i] = compressions[i].decompress(*contexts[i])
        return averages

    for averages in world.run(body):
        for i, average in averages.items():
            torch.testing.assert_close(average, torch.full((64, 64), 10 * i + 0.5))
