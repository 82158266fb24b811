"""Users' training scripts, at density 1, have the weights of the host without compression to the last bit. Ranks that
differ raise an error on every rank, and do not wait for each other."""

import ddp_script_cases
import mismatch_cases
import pytest
import script_cases
from launch import LAUNCHES, on_every_launch, run_cases
from methods import EXACT


@on_every_launch
def test_scripts_train_as_without_compression_and_ranks_that_differ_raise_the_same_error(ranks):
    # DDP itself refuses ranks whose parameters are frozen differently.
    skipped = "bias_frozen" if "--ddp" in ranks else "nothing"
    differ = [name for name in mismatch_cases.CASES if not name.startswith(skipped)]
    run_cases(ranks, {"iwp": [*script_cases.CASES, *differ]}, timeout=300)


# FFT's and DeMo's transforms round.
@pytest.mark.slow
@on_every_launch
@pytest.mark.parametrize("method", [name for name in EXACT if name not in ("iwp", "fft", "demo")])
def test_scripts_with_every_method_that_can_send_everything(ranks, method):
    run_cases(ranks, {method: list(script_cases.CASES)}, timeout=300)


def test_scripts_that_only_ddp_allows():
    run_cases(LAUNCHES["ddp-2"], {"iwp": list(ddp_script_cases.CASES)}, timeout=200)
