"""The callbacks on two ranks: trained, resumed, evaluated, stopped early."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from launch import fork

#: Modules of theirs that take long to import.
TRAINERS = {"transformers": "transformers.trainer", "lightning": "lightning", "accelerate": "accelerate"}
SCRIPT = str(Path(__file__).with_name("trainings.py"))
#: Seconds, on a machine that is busy otherwise.
LIMIT = 480.0


def test_on_two_ranks(tmp_path):
    found = [name for name in TRAINERS if find_spec(name)]
    if not found:
        pytest.skip(f"not installed: {', '.join(TRAINERS)}")
    modules = ",".join(["torch._dynamo", "hvd_compress", *(TRAINERS[name] for name in found)])
    output = fork("2", modules, SCRIPT, [str(tmp_path), *found], LIMIT, CUDA_VISIBLE_DEVICES="")
    done = set(re.findall(r"rank (\d) ok (\w+): ([\w ]+)", output))
    for rank in "01":
        assert sorted(name for r, name, _ in done if r == rank) == sorted(4 * found), output[-3000:]
