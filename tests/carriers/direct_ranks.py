"""Ranks of tests/carriers/test_direct.py: each case is a function, run by tests/forked.py."""

import math
import os
import sys
import time
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import distributed

from hvd_compress.carriers import direct
from hvd_compress.carriers.torch_collectives import TorchCollectives
from hvd_compress.engine.collectives import allgather, allreduce, alltoall, rendezvous, sum_of_parts

DTYPES = [torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.int64, torch.complex64]


def own(rank, rows, dtype):
    """What this rank sends, the same wherever it is asked for."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 2 if dtype == torch.bool else 100, (rows, 3), generator=generator).to(dtype)


def check(collectives, start):
    """Calls ``start(request)`` for allgathers and alltoalls of several sizes; returns what checks their results."""
    rank, size, started = collectives.rank, collectives.size, []
    for rows, dtype in [*product((0, 1, 7), DTYPES), (20_000, torch.float32)]:
        everyone = [own(r, rows * size, dtype) for r in range(size)]
        parts = [x[rank * rows : (rank + 1) * rows] for x in everyone]
        for request, expected in [
            (allgather(everyone[rank]), torch.cat(everyone)),
            (rendezvous(everyone[rank]), torch.cat(everyone)),
            (alltoall(everyone[rank]), torch.cat(parts)),
        ]:
            started.append((start(request), request.tensor, request.tensor.clone(), expected))

    def results(order=1):
        for handle, given, before, expected in started[::order]:
            assert not handle.done()
            found = handle.result()
            assert found.dtype == expected.dtype and torch.equal(found, expected) and torch.equal(given, before)

    return results


def test_results(world):
    for order in (1, -1):
        check(world, partial(world.start, name="x"))(order)
    transposed = own(world.rank, 4, torch.float32).t().contiguous().t()
    assert torch.equal(world.start(allgather(transposed), "x").result()[:4], own(0, 4, torch.float32))


def test_between_collectives_of_the_program(world):
    """Messages and collectives of the program, on the same group, at the same time."""
    peer = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for _ in range(3):
        theirs = torch.ones(1000)
        reduced = distributed.all_reduce(theirs, async_op=True)
        results = check(world, partial(world.start, name="x"))
        received = torch.empty(5)
        works = [
            distributed.irecv(received, peer[1], tag=0),
            distributed.isend(torch.full((5,), 1.0 * world.rank), peer[0]),
        ]
        results()
        reduced.wait()
        for work in works:
            work.wait()
        assert (received == peer[1]).all() and (theirs == world.size).all()


def test_subgroups(world):
    """Two groups of the same ranks, and the halves: the counters of groups are their own."""
    half = [r for r in range(world.size) if r % 2 == world.rank % 2]
    groups = [distributed.new_group(), distributed.new_group(half, use_local_synchronization=True)]
    for group in groups:
        check(TorchCollectives(group), partial(TorchCollectives(group).start, name="x"))()
    check(world, partial(world.start, name="x"))()


def test_dropped_handles(world):
    """On all ranks, and on one rank: the memory of the messages stays until they have arrived."""
    for droppers in (range(world.size), [1], [0]):
        for _ in range(3):
            results = check(world, partial(world.start, name="x"))
            dropped = [world.start(allgather(torch.ones(200_000)), "x") for _ in range(3)]
            if world.rank in droppers:
                time.sleep(0.05)  # the others' messages have come, or wait
                del results, dropped
            else:
                results()
                assert all(bool((handle.result() == 1).all()) for handle in dropped)
        check(world, partial(world.start, name="x"))()
    assert not direct._groups[world.group].sent, "ended collectives are forgotten"


def test_late_ranks(world):
    """A rank that has not started yet is waited for. A wait for ranks in other calls leaves the connections."""
    if world.rank == 0:
        time.sleep(1.0)
    handle = world.start(rendezvous(torch.tensor([world.rank])), "x")
    if world.rank:
        with pytest.raises(TimeoutError, match=r"a collective of torch.distributed has not ended in 0.1 s"):
            handle.result(timeout=0.1)
    assert handle.result().tolist() == [*range(world.size)]
    check(world, partial(world.start, name="x"))()


def test_answers(world):
    """Of collectives whose answers' receives are posted with them, and with a rendezvous before."""
    rank, size = world.rank, world.size
    for late in (False, True):
        answers = [allgather(torch.zeros(5), "values") for _ in range(3)]
        sent = [alltoall(torch.full((size,), 10.0 * rank + i), answer) for i, answer in enumerate(answers)]
        if late:
            row = world.start(rendezvous(torch.tensor([rank]), tuple(sent)), "row")
        parts = [world.start(request, "x") for request in sent]
        if late:
            assert row.result().tolist() == [*range(size)]
        for i, (handle, answer) in enumerate(zip(parts, answers, strict=True)):
            assert handle.result().tolist() == [10.0 * r + i for r in range(size)]
            answer.tensor.fill_(100.0 * rank + i)
            parts[i] = world.start(answer, "x")
        for i, handle in enumerate(parts):
            assert handle.result().view(size, 5).tolist() == [[100.0 * r + i] * 5 for r in range(size)]
    assert not direct._groups[world.group].awaited
    check(world, partial(world.start, name="x"))()


def test_ranks_in_different_calls(world):
    """Some start collectives that the others never do: the next rendezvous, and what follows it, work on all."""
    for starters in ([0], [1, 2], range(world.size)):
        for number in range(3):
            answer = allgather(torch.zeros(7), "values")
            ours = alltoall(torch.ones(2 * world.size), answer)
            starts = world.rank in starters
            row = world.start(rendezvous(torch.tensor([int(starts)]), (ours,) if starts else ()), "row")
            handles = [world.start(r, "x") for r in (ours, allgather(torch.ones(200_000)))] if starts else []
            found = row.result().tolist()
            assert found == [int(r in starters) for r in range(world.size)]
            if all(found) and number:
                assert all(bool((handle.result() == 1).all()) for handle in handles)
            del handles  # one that nobody answers is not waited for
    # Also without a rendezvous, once all ranks know.
    world.start(rendezvous(torch.zeros(1)), "row").result()
    if world.rank == 2:
        world.start(alltoall(torch.ones(world.size)), "x")
    world.realign()
    check(world, lambda request: world.start(replace(request, rendezvous=False), "x"))()


def test_sums(world):
    """Of every dtype that is summed, in the order of ranks, where Gloo's own sum would take 2 (N - 1) trips."""
    dtypes = torch.float16, torch.float32, torch.float64, torch.int32, torch.int64
    for dtype, shape in product(dtypes, ((1,), (7, 3), (0,))):
        everyone = [(own(r, 7, torch.float64) / 7).flatten()[: math.prod(shape)].view(shape) for r in range(world.size)]
        everyone = [(x if dtype.is_floating_point else 2**20 * x).to(dtype) for x in everyone]
        total = everyone[0].clone()
        for x in everyone[1:]:
            total += x
        assert not world.sums(everyone[0])
        road = sum_of_parts(allreduce(everyone[world.rank]), world.size)
        parts = world.start(next(road), "x").result()
        with pytest.raises(StopIteration) as end:
            road.send(world.start(road.send(parts), "x").result())
        assert torch.equal(end.value.value, total) and end.value.value.dtype == dtype


def test_end(world):
    """The last case: messages whose handles were dropped are on their way when the group is destroyed."""
    world.start(allgather(torch.ones(200_000)), "x")
    del world
    distributed.destroy_process_group()


def test_lost_rank(world):
    """A rank ends: the others get Gloo's error, as of its own collectives."""
    distributed.barrier()
    if world.rank == 3:
        time.sleep(0.3)  # until the others have left the barrier
        os._exit(0)
    errors = []
    for start in (
        lambda: world.start(allgather(torch.ones(9)), "x"),
        lambda: world.start(allreduce(torch.ones(9)), "x"),
    ):
        with pytest.raises(RuntimeError) as caught:
            start().result()
        errors.append(caught.type)
    assert errors == [RuntimeError, RuntimeError], errors


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    ranks = TorchCollectives()
    for case in sys.argv[1:]:
        globals()[case](ranks)
        print(f"{case} ok", flush=True)
    if distributed.is_initialized():
        os._exit(0)  # connections are broken on purpose
