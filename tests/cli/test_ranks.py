"""Launched ranks of ``hvd_compress.cli.ranks``."""

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
