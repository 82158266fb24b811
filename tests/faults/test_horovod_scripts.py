"""Users' training scripts under Horovod; see horovod_script_cases.py."""

import pytest
from launch import LAUNCHES, run_cases

pytest.importorskip("horovod.torch", reason="Horovod is not installed")
from horovod_script_cases import CASES


@pytest.mark.parametrize("ranks", ["mpi-2", pytest.param("gloo-2", marks=pytest.mark.slow)])
def test_scripts_under_horovod(ranks):
    run_cases(LAUNCHES[ranks], {"iwp": list(CASES)}, timeout=300, HOROVOD_CACHE_CAPACITY="8192")
