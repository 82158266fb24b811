"""Real Horovod, real ranks: every case of parallel/check_training.py under mpirun and horovodrun."""

import re

import pytest
from launch import PARALLEL, launch

LAUNCHES = {"mpi-2": ["2"], "mpi-4": ["4"], "gloo-3": ["--gloo", "3"]}

pytest.importorskip("horovod.torch", reason="Horovod is not installed")


@pytest.mark.parametrize("ranks", LAUNCHES.values(), ids=LAUNCHES.keys())
def test_training_on_real_horovod(ranks):
    script = PARALLEL / "check_training.py"
    cases = re.findall(r"^@case\ndef (\w+)", script.read_text(), re.MULTILINE)
    assert len(cases) > 10
    output = launch("run.sh", [*ranks, str(script)], timeout=300)
    for name in cases:
        assert re.search(rf"(^|>:)ok {name}$", output, re.MULTILINE), f"{name} did not finish:\n{output[-3000:]}"
