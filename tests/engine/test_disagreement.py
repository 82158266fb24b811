"""Ranks that differ in method, options, seed, step or weights raise an error, and do not hang."""

from contextlib import suppress

import pytest
import torch
from harness import Rank, mixed_model, random_steps, replicas
from hypothesis import given
from hypothesis import strategies as st
from methods import METHODS

from hvd_compress.codecs import Lanes
from hvd_compress.engine.agreement import LIMIT, all_equal
from hvd_compress.engine.bucket import Bucket, Segment
from hvd_compress.hosts.threads import ThreadWorld
from hvd_compress.selection.base import Scoring, StepSeed
from hvd_compress.selection.shared import AllEntries

DISAGREEING = ["iwp", "iwp-topk", "iwp-lanes4", "fft", "fft-gather", "mipd"]


@pytest.mark.parametrize("name", DISAGREEING)
@pytest.mark.parametrize("cause", ["seed", "state"])
def test_ranks_with_another_seed_or_step_raise_an_error(name, cause):
    """Otherwise every rank would silently get another gradient."""
    world, ranks = replicas(3, METHODS[name])
    if cause == "seed":
        ranks[1].compression.engine.seed = 1
    else:
        state = ranks[0].compression.state_dict()
        ranks[0].compression.load_state_dict({**state, "step": 3})
    with pytest.raises(RuntimeError, match="the ranks' compressors disagree: seed, density"):
        random_steps(world, ranks, range(1))


@pytest.mark.parametrize(
    ("one", "other"), [("iwp", "fft"), ("iwp", "topk"), ("iwp", "terngrad"), ("mipd", "mp2-silent")]
)
def test_ranks_with_another_method_raise_an_error(one, other):
    """Their collectives have the same names, so no rank waits for another."""
    world = ThreadWorld(2, timeout=10)
    ranks = [Rank(world, rank, mixed_model(), METHODS[name]) for rank, name in enumerate((one, other))]
    with pytest.raises((RuntimeError, ValueError), match=r"disagree|different shapes|asks for an all"):
        random_steps(world, ranks, range(1))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("iwp", {"explore": 0.1}),
        ("iwp", {"momentum": 0.5}),
        ("iwp", {"block_means": False}),
        ("iwp", {"values": Lanes(4, stochastic=False)}),
        ("fft", {"leaders": 1}),
        ("mipd", {"compensation": 0.5}),
        ("mipd", {"smoothing": 0.5}),
    ],
)
def test_ranks_with_other_options_raise_an_error(name, options):
    world = ThreadWorld(2, timeout=10)
    model = mixed_model()
    ranks = [Rank(world, 0, model, METHODS[name]), Rank(world, 1, model, METHODS[name], **options)]
    with pytest.raises(RuntimeError, match="the ranks' compressors disagree"):
        random_steps(world, ranks, range(1))


def test_ranks_with_other_weights_raise_an_error():
    """MIPD selects by the weights: if they were not broadcast, ranks would average different entries."""
    world = ThreadWorld(2, timeout=10)
    ranks = [Rank(world, rank, mixed_model(seed=rank), METHODS["mipd"]) for rank in range(2)]
    with pytest.raises(RuntimeError, match="were the parameters broadcast"):
        random_steps(world, ranks, range(1))


def test_a_state_loaded_on_one_rank_only_does_not_block_the_others():
    """The number of collectives does not depend on loading."""
    world, ranks = replicas(2, METHODS["mipd"])
    random_steps(world, ranks, range(3))
    ranks[0].compression.load_state_dict(ranks[0].compression.state_dict())
    applied = random_steps(world, ranks, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(*applied, strict=True))


def test_a_disagreement_is_remembered_until_it_is_checked():
    """On a GPU it is not checked in every step."""
    bucket = Bucket(0, [Segment("w", torch.nn.Parameter(torch.zeros(512)), 0)], torch.device("cpu"))
    selection = AllEntries(bucket)
    flag = torch.zeros(1, dtype=torch.bool)
    scoring = Scoring(None, 0.0, 1.0, 0.0, torch.zeros(1, dtype=torch.int32), flag)

    def step(number, other_digest):
        selection.begin_step(StepSeed.draw(0, number, 0, 2, 0), check=number == 2)
        exchange = selection.agree(scoring)
        ours = next(exchange).tensor
        digest = ours[1] + other_digest
        with suppress(StopIteration):
            exchange.send(ours + torch.stack([torch.ones_like(digest), digest, digest * digest]))

    step(0, other_digest=0)
    assert not flag
    step(1, other_digest=1)
    assert flag
    with pytest.raises(RuntimeError, match="disagree"):
        step(2, other_digest=0)


@given(numbers=st.lists(st.integers(0, LIMIT - 1), min_size=1, max_size=40))
def test_all_equal_is_true_if_and_only_if_all_ranks_have_the_same_number(numbers):
    """The second number is the same on all ranks: the largest allowed."""
    exchange = all_equal(torch.tensor([numbers[0], LIMIT - 1]))
    sums = sum(next(all_equal(torch.tensor([number, LIMIT - 1]))).tensor for number in numbers)
    next(exchange)
    with pytest.raises(StopIteration) as result:
        exchange.send(sums)
    assert result.value.value.tolist() == [len(set(numbers)) == 1, True]
