"""Lightning on two ranks beside code that steps optimizers or replaces weights."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from launch import fork

SCRIPT = Path(__file__).with_name("lightning_trainings.py")
#: Seconds, on a machine that is busy otherwise.
LIMIT = 480.0


def test_what_others_do_in_a_fit_on_two_ranks(tmp_path):
    if not find_spec("lightning"):
        pytest.skip("lightning is not installed")
    modules = "torch._dynamo,lightning,hvd_compress"
    output = fork("2", modules, str(SCRIPT), [str(tmp_path)], LIMIT, CUDA_VISIBLE_DEVICES="")
    done = set(re.findall(r"rank (\d) ok ([\w ]+)", output))
    for rank in "01":
        assert len([name for r, name in done if r == rank]) == 6 + 5 + 2 + 2, output[-3000:]
