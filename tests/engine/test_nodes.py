"""Nodes of several ranks, beyond what holds with and without them (tests/methods/test_invariants.py)."""

import re
import warnings

import pytest
import torch
from harness import HOSTS, DDPRank, Rank, random_steps, replicas, residuals, sgd, together
from methods import METHODS
from models import compressed, equal, gradients, mixed_model

from hvd_compress import IWP, DeMo, NoCompression, TopK
from hvd_compress.carriers.nodes import divided, groups
from hvd_compress.carriers.threads import ThreadCollectives, ThreadWorld
from hvd_compress.engine.bucket import make_buckets
from hvd_compress.engine.collectives import ring_bytes
from hvd_compress.methods import demo


def test_shares_are_whole_parameters_of_about_equal_sizes():
    """An embedding, which is more than a fair share, and the matrices of ten layers."""
    sizes = [(5000, 64), *([(64, 64), (64, 256), (256, 64)] * 10)]
    named = [(i, f"p{i}", torch.nn.Parameter(torch.zeros(size))) for i, size in enumerate(sizes)]
    for owners in (2, 3, 8):
        buckets = make_buckets(named, capacity=2**18, owners=owners)
        assert sorted(p.number for b in buckets for p in b.pieces) == list(range(len(sizes)))
        assert [b.index for b in buckets] == list(range(len(buckets)))
        fills = [min(p.number for p in b.pieces) for b in buckets]
        assert fills == sorted(fills, reverse=True), "in the order in which they fill"
        entries = [sum(b.numel for b in buckets if b.owner == owner) for owner in range(owners)]
        fair = max(sum(entries) / owners, 5000 * 64)
        assert max(entries) <= fair + 256 * 64, entries
        assert all(b.numel <= 2**16 / owners or len(b.pieces) == 1 for b in buckets)


def test_ranks_of_a_node():
    assert divided(2, 6) == [0, 0, 0, 1, 1, 1]
    assert groups(divided(2, 6), 4) == ([3, 4, 5], [1, 4])
    assert groups(["b", "a", "b", "a"], 2) == ([0, 2], [2, 3])  # not in order
    with pytest.raises(ValueError, match="nodes must have equally many ranks, these have 3, 2"):
        groups("aabab", 0)
    for nodes in (0, 4, -2):
        with pytest.raises(ValueError, match=f"divisor of the number of ranks, 6, got {nodes}"):
            divided(nodes, 6)
    with pytest.raises(TypeError, match="nodes must be an integer, or True, or, with torch, a DeviceMesh"):
        divided("two", 6)


@pytest.mark.parametrize("host", HOSTS)
def test_only_the_owner_keeps_a_residual(host):
    world, ranks = replicas((2, 2), IWP, host=host, density=1 / 16)
    random_steps(world, ranks, range(3))
    for rank in ranks:
        for bucket in rank.compression.buckets:
            assert ("residual" in vars(bucket)) == (bucket.owner == rank.rank % 2)
    whole = sum(b.numel for b in ranks[0].compression.buckets)
    parts = [sum(work.bucket.numel for work in rank.compression.works) for rank in ranks[:2]]
    assert sum(parts) == whole and max(parts) < 0.85 * whole


@pytest.mark.parametrize("host", HOSTS)
def test_a_single_node_averages_densely_with_a_warning(host):
    with pytest.warns(UserWarning, match="IWP: all ranks are on one node: nothing is compressed"):
        world, ranks = replicas((1, 3), IWP, host=host)
    grads = [gradients(r.model, seed=r.rank) for r in ranks]
    mean = [torch.stack([g[i] for g in grads]).mean(0) for i in range(len(grads[0]))]
    applied = together(world, ranks, grads)
    torch.testing.assert_close(applied[0], mean)
    assert all(equal(applied[0], other) for other in applied[1:])


def test_nodes_of_one_rank_are_none():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        world, ranks = replicas((3, 1), IWP)
    flat_world, flat = replicas(3, IWP)
    assert ranks[0].compression.engine.nodes.inside is None
    assert equal(random_steps(world, ranks, range(3))[0], random_steps(flat_world, flat, range(3))[0])


@pytest.mark.parametrize("host", HOSTS)
def test_bytes_between_nodes_and_inside_are_counted_apart(host, monkeypatch):
    """Of what every collective of a step hands over. On Horovod, it averages uncompressed gradients itself."""
    world, ranks = replicas((2, 3), IWP, host=host, density=1 / 16)
    random_steps(world, ranks, range(2))
    sent = [{"between": 0.0, "inside": 0.0} for _ in ranks]
    start = ThreadCollectives.start

    def spy(collectives, request, name):
        if name.startswith("hvd_compress"):
            between = {2: 1.0, 3: 0.0, 6: 1 / 3}[collectives.size]
            count = ring_bytes(request.verb, request.tensor.nbytes, collectives.size)
            sent[collectives._number]["between"] += count * between
            sent[collectives._number]["inside"] += count * (1 - between)
        return start(collectives, request, name)

    dense = sum(p.numel() for p in mixed_model().parameters() if not compressed(p))
    monkeypatch.setattr(ThreadCollectives, "start", spy)
    random_steps(world, ranks, range(2, 3))
    ring = 0 if host == "ddp" else 4 * dense * 2 * 5 / 6
    for rank, counted in zip(ranks, sent, strict=True):
        last = rank.compression.stats()["last"]
        assert last["wire_bytes"] == pytest.approx(counted["between"] + ring / 3)
        assert last["inside_bytes"] == pytest.approx(counted["inside"] + ring * 2 / 3)
        parts = ("values", "indices", "dense_tensor", "budget")
        assert last["wire_bytes"] == pytest.approx(sum(last[f"{part}_bytes"] for part in parts))
    card = sum(rank.compression.stats()["last"]["dense_bytes"] for rank in ranks[:3])
    whole = sum(p.numel() for p in mixed_model().parameters())
    assert card == pytest.approx(4 * whole * 2 * 5 / 6), "one ring of all ranks"


def test_gathering_methods_send_fewer_bytes_at_the_card_by_the_ranks_of_a_node():
    card = {}
    for size in (6, (2, 3)):
        world, ranks = replicas(size, TopK, density=1 / 16, min_numel=1)
        random_steps(world, ranks, range(2))
        last = [rank.compression.stats()["last"] for rank in ranks[:3]]
        card[size] = sum(stats["indices_bytes"] + stats["values_bytes"] for stats in last)
    # Flat, each of three ranks sends its own to five others, of which the ring takes all over both cards.
    assert card[(2, 3)] < 1.05 / 3 * card[6], card


def test_without_compression_nothing_changes():
    flat_world, flat = replicas(4, NoCompression)
    world, ranks = replicas((2, 2), NoCompression)
    assert equal(random_steps(world, ranks, range(2))[0], random_steps(flat_world, flat, range(2))[0])
    last = ranks[0].compression.stats()["last"]
    assert last["dense_bytes"] == last["wire_bytes"] - last["budget_bytes"]  # the comparison of weights


def test_only_the_owner_orthogonalizes(monkeypatch):
    calls = []
    orthogonalize = demo.orthogonalize
    monkeypatch.setattr(demo, "orthogonalize", lambda *given: (calls.append(given), orthogonalize(*given)))
    world, ranks = replicas((2, 2), DeMo, orthogonal=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as that of scaled signs, on a rank that has written only its own
        random_steps(world, ranks, range(2))
        for optimizer in sgd(ranks, lr=0.1):
            optimizer.step()
    nodes, steps = 2, 2
    assert len(calls) == nodes * steps * sum(len(b.pieces) for b in ranks[0].compression.buckets)
    assert all(equal(ranks[0].model.parameters(), r.model.parameters()) for r in ranks[1:])


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", ["iwp", "demo-gather", "powersgd"])
def test_the_step_after_a_failed_one_works(name, host):
    """It fails before a bucket is complete: gradients that the node has not summed are lost, and zero."""
    world, ranks = replicas((2, 2), METHODS[name], host=host)
    random_steps(world, ranks, range(2))
    before = [residuals(r) for r in ranks]

    def fail(i):
        engine = ranks[i].compression.engine
        place = next(place for place in engine.place_of if place and len(place.work.bucket.pieces) > 1)
        p = place.piece.parameter
        p.grad = torch.ones_like(p)
        with engine.entered:
            ranks[i].compression.engine.clock.arrive(place.piece.number, p.grad)
        ranks[i].compression.reset()
        assert not p.grad.any()

    world.run(fail)
    for rank, held in zip(ranks, before, strict=True):
        assert all(torch.equal(residuals(rank)[key], held[key]) for key in held)
    applied = random_steps(world, ranks, range(2, 4))
    assert all(equal(applied[0], other) for other in applied[1:])
    assert all(grad.any() for grad in applied[0])


@pytest.mark.parametrize("name", ["iwp", "mp2", "powersgd"])
def test_new_nodes_agree_after_an_elastic_reset(name):
    """The survivor has trained before, and keeps what its share of the buckets holds."""
    world, ranks = replicas((2, 2), METHODS[name])
    random_steps(world, ranks, range(4))
    formed = ThreadWorld(6)
    survivors = ranks[2:]
    for number, rank in enumerate(survivors):
        rank.move_to(formed, number)
    fresh = [Rank(formed, i, survivors[0].model, METHODS[name], nodes=3) for i in range(2, 6)]
    applied = random_steps(formed, [*survivors, *fresh], range(20, 24))
    assert all(equal(applied[0], other) for other in applied[1:])
    assert [r.compression.step for r in (*survivors, *fresh)] == [4] * 6


@pytest.mark.parametrize("host", HOSTS)
def test_ranks_with_other_nodes_raise_an_error(host):
    kind = DDPRank if host == "ddp" else Rank
    world = ThreadWorld(4, ordered=host == "ddp")
    ranks = [kind(world, r, mixed_model(), IWP, nodes=2 if r < 3 else 4) for r in range(4)]

    def step(i):
        with pytest.raises(RuntimeError, match=re.escape("nodes, ranks of a node: 2, 2 on ranks 0, 1, 2; 4, 1 on")):
            ranks[i].exchange(gradients(ranks[i].model, seed=i), shuffle=0)

    world.run(step)


def test_orthogonal_averages_need_two_nodes():
    """On one, everything is averaged uncompressed, and would be signs instead."""
    with pytest.raises(ValueError, match="on a single node there are none"):
        replicas((1, 2), DeMo, orthogonal=True)


def test_a_failed_renewal_is_tried_again():
    world, ranks = replicas((2, 2), TopK)
    random_steps(world, ranks, range(1))
    engine = ranks[0].compression.engine
    renew, failures = engine.nodes.renew, [RuntimeError("the place has changed")]

    def fail_once():
        if failures:
            raise failures.pop()
        renew()

    engine.nodes.renew = fail_once
    engine.collectives.generation = lambda: "another"
    with pytest.raises(RuntimeError, match="the place has changed"):
        engine.check_generation()
    assert engine.check_generation() and not engine.check_generation()
