"""The operators agree with the reference at every instruction set level."""

import os
import subprocess
import sys

import pytest
from checks import EXAMPLES, FEW
from launch import ROOT

from hvd_compress import ops


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_operators_equal_the_reference_at_every_level(capability):
    """Without --all, comparisons with the reference only. Schemas and the checks of arguments depend on no level."""
    kept = "equals_reference or many or memory" if FEW else "not opcheck and not refuses and not overlap"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/operators", "-k", kept]
    command += ["--ignore", "tests/operators/test_instruction_sets.py", "--ignore", "tests/operators/test_load.py"]
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "TEST_EXAMPLES": str(0.3 * EXAMPLES)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("capability, name", [("default", "portable"), ("avx2", "AVX2")])
def test_the_level_can_be_lowered(capability, name):
    """ATEN_CPU_CAPABILITY selects the level, which the test above relies on."""
    if capability == "avx2" and ops.CPU_CAPABILITY == "portable":
        pytest.skip("this processor has no AVX2")
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    script = "from hvd_compress import ops; print(ops.CPU_CAPABILITY)"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == name
