"""Trainings on two ranks that are evaluated, interrupted, ended and saved by other code than the trainer's own."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from launch import fork

SCRIPT = Path(__file__).with_name("endings.py")
CASES = re.findall(r"^@case\ndef (\w+)", SCRIPT.read_text(), re.MULTILINE)
MODULES = "torch._dynamo,transformers.trainer,accelerate,hvd_compress"
#: Seconds, on a machine that is busy otherwise.
LIMIT = 900.0


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    if not (find_spec("transformers") and find_spec("accelerate")):
        pytest.skip("transformers or accelerate is not installed")
    return fork("2", MODULES, str(SCRIPT), [str(tmp_path_factory.mktemp("runs"))], LIMIT)


@pytest.mark.parametrize("case", CASES)
def test_on_two_ranks(case, output):
    found = re.findall(rf"^rank (\d) ok: {case}$", output, re.MULTILINE)
    assert sorted(found) == ["0", "1"], output[output.find(f"failed: {case}") :][:3000]
