"""scripts/lab/bench_growth.py: its simulated ranks, and its figures."""

import bench_growth as growth
import pytest
import torch

from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.engine.collectives import allgather, allreduce, alltoall


@pytest.mark.parametrize(
    "request_",
    [
        allreduce(torch.arange(6.0)),
        allreduce(torch.arange(4)),
        allgather(torch.arange(5, dtype=torch.uint8)),
        allgather(torch.arange(6.0).view(3, 2)),
        alltoall(torch.arange(9)),
    ],
    ids=lambda request: request.verb,
)
def test_the_mirror_answers_as_ranks_that_send_the_same(request_):
    world = ThreadWorld(3)
    want = world.run(lambda rank: world.collectives(rank).start(request_, "x").result())[0]
    got = growth.Mirror(3).start(request_, "x").result()
    assert got.dtype == want.dtype and torch.equal(got, want)
