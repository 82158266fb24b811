"""Horovod's optimizer behaves with a compressor in it as without: tests/parallel/optimizer_cases.py on two ranks.

Two reasons for a difference are documented (docs/shared_selection.md, docs/limits.md): MIPD needs equal weights on all
ranks, and a gradient between ``backward()`` and ``synchronize()`` is the compressor's.
"""

import pytest
from launch import run_cases

pytest.importorskip("horovod.torch", reason="Horovod is not installed")
from optimizer_cases import CASES

LAUNCHES = {"mpi": ["2"], "gloo": ["--gloo", "2"]}


@pytest.mark.parametrize(
    "ranks", [pytest.param(r, id=n, marks=[pytest.mark.slow] * (n != "mpi")) for n, r in LAUNCHES.items()]
)
def test_horovods_optimizer(ranks):
    run_cases(ranks, {method: list(CASES) for method in ("stock", "iwp", "fft", "mipd", "dgc")}, timeout=300)
