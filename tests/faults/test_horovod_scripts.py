"""Horovod's optimizer behaves with a compressor in it as without (tests/parallel/optimizer_cases.py), and users'
training scripts train as without (horovod_script_cases.py), on two ranks.

Two reasons for a difference are documented (docs/methods.md, docs/horovod.md): MIPD needs equal weights on all
ranks, and a gradient between ``backward()`` and ``synchronize()`` is the compressor's.
"""

import pytest
from launch import LAUNCHES, run_cases

pytest.importorskip("horovod.torch", reason="Horovod is not installed")
import horovod_script_cases
import optimizer_cases


@pytest.mark.parametrize("ranks", ["mpi-2", pytest.param("gloo-2", marks=pytest.mark.slow)])
def test_optimizers_and_scripts_under_horovod(ranks):
    methods = ("stock", "mipd", "iwp") if ranks == "mpi-2" else ("stock", "fft", "mipd", "dgc", "iwp")
    plan = {method: list(optimizer_cases.CASES) for method in methods}
    # Errors in a backward pass leave averages that one rank alone has started, for which Horovod ends all ranks when
    # they are older than its limit: the case with most of them comes last, and the limit is longer than it takes.
    plan["iwp"] += sorted(horovod_script_cases.CASES, key=lambda name: name == "layouts_that_change")
    limits = {"HOROVOD_CACHE_CAPACITY": "8192", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "400"}
    run_cases(LAUNCHES[ranks], plan, timeout=600, **limits)
