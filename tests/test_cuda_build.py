"""The CUDA operators compile without register spills for every supported architecture. Needs nvcc 13, but no GPU."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT, finish, start


def release() -> int:
    """The major version of the nvcc that build_cuda.sh uses; 0 if there is none."""
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which(Path(home, "bin", "nvcc") if home else "nvcc")
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout if nvcc else ""
    found = re.search(r"release (\d+)", text)
    return int(found[1]) if found else 0


@pytest.mark.slow
@pytest.mark.skipif(release() < 13, reason="there is no nvcc 13")
def test_compiles_without_spills() -> None:
    process = start([str(ROOT / "scripts" / "build_cuda.sh"), sys.executable])
    output = finish(process, timeout=900)
    assert process.returncode == 0, output
    sources = list((ROOT / "csrc" / "cuda").glob("*.cu"))
    assert f"compiled: {len(sources)} objects" in output
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", output)
    # Three architectures; accumulate_select has two variants, codebook's operators and codebook_move one for each
    # number of bits, accumulate one more without codes, codebook's operators one more for large books, the other codes'
    # four together, the averages' three more, the means' three, the moments' three, the scales' four, gather, hadamard,
    # scatter and select one each.
    assert len(spills) == 3 * (2 + 2 * (8 + 1) + (8 + 1) + (8 + 3) + 4 + 3 + 3 + 4 + 4), output
    assert set(spills) == {("0", "0")}, output
