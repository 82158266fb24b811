"""The small rooms: schedule, budget, randomness, the local world, memory order, finding a parameter."""

from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_compress.engine.agreement import LIMIT, all_equal
from hvd_compress.engine.bucket import Bucket, Segment, fill, in_order_of, is_dense
from hvd_compress.selection.budget import apportion, shares
from hvd_compress.engine.collectives import allgather, allreduce, alltoall, ring_bytes
from hvd_compress.hosts.threads import ThreadWorld
from hvd_compress.hosts.lookup import GradientLookup
from hvd_compress.engine.rng import derive, permutation
from hvd_compress.selection.schedule import WarmUp
from hvd_compress.selection.base import Scoring, StepSeed


def test_warm_up_goes_down_by_fours_and_stays():
    schedule = WarmUp(1 / 64, 30)
    assert [schedule(step) for step in (0, 14, 15, 29, 30, 10**6)] == [1 / 4, 1 / 4, 1 / 16, 1 / 16, 1 / 64, 1 / 64]
    assert WarmUp(1 / 64)(0) == 1 / 64
    assert WarmUp(1 / 2, 10)(0) == 1 / 2
    assert [WarmUp(1 / 100, 9)(step) for step in (0, 3, 8, 9)] == [1 / 4, 1 / 16, 1 / 64, 1 / 100]


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_apportion_adds_up_within_ceilings(data):
    count = data.draw(st.integers(1, 12))
    ceilings = data.draw(st.lists(st.integers(1, 5000), min_size=count, max_size=count))
    weights = data.draw(st.lists(st.floats(1e-3, 1e4), min_size=count, max_size=count))
    total = data.draw(st.integers(1, 6000))
    parts = apportion(total, weights, ceilings)
    assert sum(parts) == min(total, sum(ceilings))
    assert all(0 <= part <= ceiling for part, ceiling in zip(parts, ceilings, strict=True))
    if total >= count:
        assert min(parts) >= 1
    assert parts == apportion(total, weights, ceilings)


def test_apportion_is_exact_where_it_can_be():
    sizes = [1024, 36864, 2304]
    assert apportion(sum(sizes) // 64, sizes, sizes) == [size // 64 for size in sizes]
    assert apportion(3, [1.0, 5.0, 2.0, 4.0], [9] * 4) == [0, 1, 1, 1]


def test_shares_follow_importance_within_bounds():
    sizes = [1000, 1000, 1000]
    even = shares([5.0, 5.0, 5.0], sizes)
    assert even == [1000.0] * 3
    low, middle, high = shares([0.001, 1.0, 100.0], sizes)
    assert low == 250.0 and low <= middle < high <= 4000.0
    assert shares([0.0, 0.0], [3, 4]) == [3.0, 4.0]


def test_keys_and_orders_are_functions_of_their_counters():
    assert derive(1, 2, 3) == derive(1, 2, 3) < 2**31
    assert len({derive(0, step, bucket) for step in range(100) for bucket in range(10)}) == 1000
    assert sorted(permutation(7, 9)) == list(range(9))
    # Over many steps every rank stands everywhere about equally often.
    places = torch.zeros(4, 4)
    for step in range(4000):
        for place, rank in enumerate(permutation(derive(0, step, 0), 4)):
            places[place, rank] += 1
    assert (places / 1000 - 1).abs().max() < 0.15


def test_local_world_performs_the_three_verbs():
    world = ThreadWorld(3, timeout=5)

    def body(rank):
        ends = world.collectives(rank)
        x = torch.arange(6.0) + 10 * rank
        handles = [ends.start(verb(x), verb.__name__) for verb in (allreduce, allgather, alltoall)]
        return [handle.result() for handle in handles]

    for rank, (total, everything, parts) in enumerate(world.run(body)):
        assert total.tolist() == [30 + 3 * i for i in range(6)]
        assert everything.tolist() == [i + 10 * r for r in range(3) for i in range(6)]
        assert parts.tolist() == [i + 10 * r for r in range(3) for i in (2 * rank, 2 * rank + 1)]


def test_local_world_names_who_is_missing():
    world = ThreadWorld(2, timeout=0.1)
    handle = world.collectives(0).start(allreduce(torch.zeros(1)), "sum")
    assert not handle.done()
    with pytest.raises(TimeoutError, match=r"sum: rank 0 waited 0.1 s for ranks \[1\]"):
        handle.result()


def test_local_world_refuses_sums_of_different_shapes():
    world = ThreadWorld(2, timeout=5)
    with pytest.raises(ValueError, match="different shapes"):
        world.run(lambda rank: world.collectives(rank).start(allreduce(torch.zeros(1 + rank)), "sum").result())


def test_ring_bytes():
    assert ring_bytes("allreduce", 1000, 4) == 1500
    assert ring_bytes("allgather", 1000, 4) == 3000
    assert ring_bytes("alltoall", 1000, 4) == 750
    assert [ring_bytes(verb, 1000, 1) for verb in ("allreduce", "allgather", "alltoall")] == [0, 0, 0]


def test_memory_order():
    x = torch.randn(2, 3, 4, 5)
    last = x.contiguous(memory_format=torch.channels_last)
    assert is_dense(x) and is_dense(last) and is_dense(x.transpose(0, 2))
    assert not is_dense(x[:, ::2]) and not is_dense(x[:1].expand(2, 3, 4, 5))
    assert in_order_of(last, last) is last
    moved = in_order_of(last, x)
    assert torch.equal(moved, x) and moved.stride() == last.stride()
    # A dimension of length 1 may carry any stride.
    one = torch.randn(8, 1, 3, 3)
    assert in_order_of(one.contiguous(memory_format=torch.channels_last), one) is one


def test_buckets_start_with_the_last_parameter_and_keep_to_their_capacity():
    parameters = [(f"p{i}", torch.nn.Parameter(torch.zeros(size))) for i, size in enumerate((300, 70_000, 200, 10))]
    buckets = make_buckets(parameters, capacity=4 * 1024)
    assert [[s.name for s in b.segments] for b in buckets] == [["p3", "p2"], ["p1"], ["p0"]]
    assert [s.first_block for s in buckets[0].segments] == [0, 1] and buckets[0].blocks == 2
    assert buckets[1].residual.numel() == 274 * 256


def test_lookup_finds_by_hook_by_scan_and_never_wrongly():
    parameters = [torch.nn.Parameter(torch.randn(4, 4)) for _ in range(3)]
    lookup = GradientLookup(parameters)
    (parameters[0] * parameters[1]).sum().backward()
    assert lookup.find(parameters[0].grad) == 0 and lookup.find(parameters[1].grad) == 1
    # Horovod fills in the gradient of an unused parameter: no hook fired.
    parameters[2].grad = torch.zeros(4, 4)
    assert lookup.find(parameters[2].grad) == 2
    # An old gradient object is nobody's, even where its id was noted.
    old = parameters[0].grad
    parameters[0].grad = None
    assert lookup.find(old) is None
    assert lookup.find(torch.zeros(4, 4)) is None
    assert lookup.is_parameter(parameters[1]) and not lookup.is_parameter(parameters[1].data)


def test_lookup_finds_the_dense_copies_of_sparse_gradients():
    tables = [torch.nn.Embedding(50, 8, sparse=True) for _ in range(2)]
    lookup = GradientLookup([table.weight for table in tables])
    (tables[0](torch.tensor([1, 2])).sum() + tables[1](torch.tensor([3])).sum()).backward()
    for number in (1, 0):
        assert tables[number].weight.grad.is_sparse
        assert lookup.find(tables[number].weight.grad.to_dense()) == number


def test_lookup_tells_equal_copies_apart():
    """By whose hook was the latest, as Horovod's own follows it; at the end of a step, by who had none yet."""
    tables = [torch.nn.Embedding(50, 8, sparse=True) for _ in range(2)]
    lookup = GradientLookup([table.weight for table in tables])
    found = []
    for table in tables:  # as Horovod's hooks, which come after ours
        table.weight.register_post_accumulate_grad_hook(lambda p: found.append(lookup.find(p.grad.to_dense())))
    word = torch.tensor([1])
    (tables[1](word) + tables[0](word)).sum().backward()
    assert sorted(found) == [0, 1]
    lookup.forget()
    late = [lookup.find(table.weight.grad.to_dense()) for table in tables]
    assert sorted(late) == [0, 1]
    lookup.forget()
    nearly = tables[0].weight.grad.to_dense() * (1 + 1e-6)  # as a GPU adds rows up in another order
    assert lookup.find(nearly) is not None and lookup.find(nearly * 2) is None


def test_lookup_takes_a_copy_for_what_it_is_copied_from():
    table = torch.nn.Embedding(50, 8, sparse=True)
    lookup = GradientLookup([table.weight])
    (table(torch.tensor([1])) * float("nan")).sum().backward()
    assert lookup.find(table.weight.grad.to_dense()) == 0, "a NaN is a NaN"
    assert lookup.find(torch.ones(50, 8)) is None, "of its shape, and none of its"


def test_lookup_forgets_where_nobody_begins_a_step():
    parameters = [torch.nn.Parameter(torch.randn(4)) for _ in range(3)]
    lookup, kept = GradientLookup(parameters), []
    for _ in range(20):
        sum(p.sum() for p in parameters).backward()
        kept += [p.grad for p in parameters]  # so that no id comes twice
        for p in parameters:
            p.grad = None
    assert len(lookup._number_by_id) <= 2 * len(parameters) + 1


def test_ranks_that_chose_differently_once_are_told_when_somebody_looks():
    """On a GPU that is not in every step."""
    bucket = Bucket(0, [Segment("w", torch.nn.Parameter(torch.zeros(512)), 0)], torch.device("cpu"))
    selection = AllEntries(bucket)
    flag = torch.zeros(1, dtype=torch.bool)
    rule = Scoring(None, 0.0, 1.0, 0.0, torch.zeros(1, dtype=torch.int32), flag)

    def step(number, other_mark):
        selection.begin(StepSeed.draw(0, number, 0, 2, 0), check=number == 2)
        exchange = selection.agree(rule)
        ours = next(exchange).tensor
        mark = ours[1] + other_mark
        with suppress(StopIteration):
            exchange.send(ours + torch.stack([torch.ones_like(mark), mark, mark * mark]))

    step(0, other_mark=0)
    assert not flag
    step(1, other_mark=1)
    assert flag
    with pytest.raises(RuntimeError, match="disagree"):
        step(2, other_mark=0)


@given(marks=st.lists(st.integers(0, LIMIT - 1), min_size=1, max_size=40))
def test_marks_are_all_equal_where_all_ranks_have_the_same(marks):
    """The second mark is the same everywhere, the largest."""
    asking = all_equal(torch.tensor([marks[0], LIMIT - 1]))
    sums = sum(next(all_equal(torch.tensor([mark, LIMIT - 1]))).tensor for mark in marks)
    next(asking)
    with pytest.raises(StopIteration) as answer:
        asking.send(sums)
    assert answer.value.value.tolist() == [len(set(marks)) == 1, True]
