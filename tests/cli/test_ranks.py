"""Launched ranks of ``hvd_compress.cli.ranks``."""

import pytest
from launch import host_of, launch, on_every_launch

SCRIPT = """
import sys, time
import torch
from hvd_compress.cli import ranks

rank = ranks.start("ddp" if "ddp" in sys.argv else "horovod")
assert rank.gather({"data": [0.5] * rank.rank}) == [{"data": []}, {"data": [0.5]}]
for wait in (lambda: rank.gather(None), lambda: rank.sum(torch.ones(3))):
    if rank.rank == 1:
        time.sleep(1)
    before, begin = time.thread_time(), time.monotonic()
    wait()
    if rank.rank == 0:
        print("used", (time.thread_time() - before) / (time.monotonic() - begin), flush=True)
rank.close()
"""


@on_every_launch
def test_a_rank_that_waits_leaves_its_core_to_the_others(ranks, tmp_path):
    script = tmp_path / "wait.py"
    script.write_text(SCRIPT)
    output = launch("run.sh", [*ranks, str(script), *host_of(ranks)], timeout=100)
    used = [float(line.split()[-1]) for line in output.splitlines() if "used " in line]
    assert len(used) == 2 and max(used) < 0.4, output[-3000:]


NODES = """
import os, sys
import horovod.torch as hvd
import torch
import hvd_compress
from hvd_compress.cli import ranks

for nodes in map(int, sys.argv[1:]):
    rank = ranks.start("horovod", nodes=nodes)
    model = torch.nn.Linear(64, 64)
    levels = hvd_compress.IWP(model.named_parameters(), nodes=nodes).engine.nodes
    assert levels.between.size == nodes
    assert levels.inside is None if nodes == 4 else (levels.inside.size == 4 // nodes)
    assert not os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS")
    print("made", flush=True)
    rank.gather(None)  # another one may still ask Horovod for a size
    if nodes == int(sys.argv[-1]):
        rank.close()
    hvd.shutdown()  # to begin again, which Open MPI cannot
"""


@pytest.mark.parametrize(("launcher", "numbers"), [(["--gloo"], "124"), ([], "2")], ids=["gloo", "mpi"])
def test_process_sets_of_nodes_are_given_to_init(launcher, numbers, tmp_path):
    """With dynamic ones, calls that start a collective wait for the network (scripts/lab/process_sets.py)."""
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    script = tmp_path / "nodes.py"
    script.write_text(NODES)
    output = launch("run.sh", [*launcher, "4", str(script), *numbers], timeout=100)
    assert output.count("made") == 4 * len(numbers)
