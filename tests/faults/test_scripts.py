"""Users' training scripts, at density 1, have the weights of the host without compression to the last bit. Ranks that
differ raise an error on every rank, and do not wait for each other."""

import ddp_script_cases
import mismatch_cases
import pytest
import script_cases
from launch import on_every_launch, on_launches, run_cases
from methods import EXACT


@on_launches("mpi-2", "ddp-2")
def test_scripts_train_as_without_compression_and_ranks_that_differ_raise_the_same_error(ranks):
    """Under DDP, also scripts that only it allows."""
    ddp = "--ddp" in ranks
    # DDP itself refuses ranks whose parameters are frozen differently.
    differ = [name for name in mismatch_cases.CASES if not (ddp and name.startswith("bias_frozen"))]
    run_cases(ranks, {"iwp": [*(ddp_script_cases.CASES if ddp else ()), *script_cases.CASES, *differ]}, timeout=400)


# FFT's and DeMo's transforms round.
@pytest.mark.slow
@on_every_launch
@pytest.mark.parametrize("method", [name for name in EXACT if name not in ("iwp", "fft", "demo")])
def test_scripts_with_every_method_that_can_send_everything(ranks, method):
    run_cases(ranks, {method: list(script_cases.CASES)}, timeout=300)
