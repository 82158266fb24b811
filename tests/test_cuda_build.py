"""The CUDA operators compile, without spilling registers, for every architecture we ship. Needs nvcc, but no GPU."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(not (shutil.which("nvcc") or os.environ.get("CUDA_HOME")), reason="there is no nvcc")
def test_compiles_without_spills() -> None:
    command = [ROOT / "scripts" / "build_cuda.sh", sys.executable]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    sources = list((ROOT / "csrc" / "cuda").glob("*.cu"))
    assert f"compiled: {len(sources)} objects" in run.stdout
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", run.stdout)
    # Two architectures; accumulate_select has six variants, the codes' operators have eight together, the means' three,
    # the scales' two, the others one.
    assert len(spills) == 2 * (6 + 8 + 3 + 2 + 1 + 1 + 1), run.stdout
    assert set(spills) == {("0", "0")}, run.stdout
