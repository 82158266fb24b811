"""Ranks that differ raise an error on every rank, and do not wait for each other."""

import mismatch_cases
from launch import on_every_launch, run_cases


@on_every_launch
def test_ranks_that_differ_all_raise_the_same_error(ranks):
    # DDP itself refuses ranks whose parameters are frozen differently.
    skipped = "bias_frozen" if "--ddp" in ranks else "nothing"
    run_cases(ranks, {"iwp": [name for name in mismatch_cases.CASES if not name.startswith(skipped)]}, timeout=200)
