"""Ranks that differ raise an error on every rank, and do not wait for each other."""

import mismatch_cases
import pytest
from launch import run_cases

LAUNCHES = {"mpi-2": ["2"], "gloo-2": ["--gloo", "2"], "ddp-2": ["--ddp", "2"]}
on_every_launch = pytest.mark.parametrize("ranks", LAUNCHES.values(), ids=LAUNCHES.keys())


@on_every_launch
def test_ranks_that_differ_all_raise_the_same_error(ranks):
    if "--ddp" not in ranks:
        pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    # DDP itself refuses ranks whose parameters are frozen differently.
    skipped = "bias_frozen" if "--ddp" in ranks else "nothing"
    run_cases(ranks, {"iwp": [name for name in mismatch_cases.CASES if not name.startswith(skipped)]}, timeout=200)
