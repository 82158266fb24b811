"""scripts/lab/bench_growth.py: its simulated ranks, and its figures."""

import sys

import bench_growth as growth
import pytest
import torch
from experiment.result_file import read_runs
from launch import finish, start

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


@pytest.mark.slow
def test_measures_in_processes_of_their_own(tmp_path):
    path = tmp_path / "runs.jsonl" / "entries"
    options = ["--methods", "iwp,topk", "--millions", "1,8", "--ranks", "2", "--steps", "1", "--json", str(path)]
    command = [sys.executable, growth.__file__, *options]
    process = start(command)
    output = finish(process, timeout=240)
    assert process.returncode == 0, output
    rows = read_runs(path.parent)["entries"]["rows"]
    asked = [(method, millions * 10**6, 2) for method in ("iwp", "topk") for millions in (1, 8)]
    assert [(row["method"], row["entries"], row["ranks"]) for row in rows] == asked
    # The residual has four bytes per entry, a slot about twenty.
    assert all(row["ms"] > 0 and row["peak_bytes_per_entry"] >= row["held_bytes_per_entry"] for row in rows)
    small, large = (row["held_bytes_per_entry"] for row in rows[:2])
    assert 4 < large < 5 and small == pytest.approx(large, abs=1)
