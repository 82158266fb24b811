"""Users' training scripts, at density 1, have the weights of the host without compression to the last bit."""

import pytest
import script_cases
from launch import run_cases
from methods import EXACT

LAUNCHES = {"mpi-2": ["2"], "gloo-2": ["--gloo", "2"], "ddp-2": ["--ddp", "2"]}


@pytest.mark.parametrize("ranks", LAUNCHES.values(), ids=LAUNCHES.keys())
def test_scripts_train_as_without_compression(ranks):
    if "--ddp" not in ranks:
        pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    run_cases(ranks, {"iwp": list(script_cases.CASES)}, timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", LAUNCHES.values(), ids=LAUNCHES.keys())
@pytest.mark.parametrize("method", [name for name in EXACT if name not in ("iwp", "fft")])
def test_scripts_with_every_method_that_can_send_everything(ranks, method):
    if "--ddp" not in ranks:
        pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    run_cases(ranks, {method: list(script_cases.CASES)}, timeout=300)
