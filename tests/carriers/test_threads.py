"""The ranks in threads that the tests run on."""

import time

import pytest
import torch

from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.engine.collectives import allgather, allreduce, alltoall


def test_the_three_collectives():
    world = ThreadWorld(3)

    def body(rank):
        collectives = world.collectives(rank)
        x = torch.arange(6.0) + 10 * rank
        handles = [collectives.start(verb(x), verb.__name__) for verb in (allreduce, allgather, alltoall)]
        return [handle.result() for handle in handles]

    for rank, (total, everything, parts) in enumerate(world.run(body)):
        assert total.tolist() == [30 + 3 * i for i in range(6)]
        assert everything.tolist() == [i + 10 * r for r in range(3) for i in range(6)]
        assert parts.tolist() == [i + 10 * r for r in range(3) for i in (2 * rank, 2 * rank + 1)]


def test_a_timeout_names_the_missing_ranks():
    world = ThreadWorld(2, timeout=0.1)
    handle = world.collectives(0).start(allreduce(torch.zeros(1)), "sum")
    assert not handle.done()
    with pytest.raises(TimeoutError, match=r"sum: rank 0 waited 0.1 s for ranks \[1\]"):
        handle.result()


def test_sums_of_different_shapes_raise_an_error():
    world, begin = ThreadWorld(2, timeout=600), time.monotonic()
    with pytest.raises(ValueError, match="different shapes"):
        world.run(lambda rank: world.collectives(rank).start(allreduce(torch.zeros(1 + rank)), "sum").result())
    assert time.monotonic() - begin < 300, "the rank that waited was told"


def test_ordered_collectives_in_different_orders_raise_an_error():
    """As torch.distributed, which would sum the wrong tensors."""
    world = ThreadWorld(2, ordered=True)

    def body(rank):
        collectives = world.collectives(rank)
        for name in ("a", "b") if rank else ("b", "a"):
            collectives.start(allreduce(torch.zeros(1)), name).result()

    with pytest.raises(ValueError, match="different orders"):
        world.run(body)


def test_ordered_handles_never_depend_on_timing():
    world = ThreadWorld(1, ordered=True)
    handle = world.collectives(0).start(allreduce(torch.ones(1)), "sum")
    assert not handle.done() and handle.result() == 1.0


def test_ranks_in_turn_compute_one_at_a_time():
    world, computing, most = ThreadWorld(4, ordered=True, in_turn=True), 0, 0

    def body(rank):
        nonlocal computing, most
        collectives = world.collectives(rank)
        for _ in range(3):
            computing += 1
            most = max(most, computing)
            time.sleep(0.01)
            computing -= 1
            total = collectives.start(allreduce(torch.ones(1)), "sum").result()
        return total.item()

    assert world.run(body) == [4.0] * 4 and most == 1


def test_ranks_in_turn_must_not_poll():
    with pytest.raises(ValueError, match="needs ordered=True"):
        ThreadWorld(2, in_turn=True)
