"""Real Horovod, real ranks: every case of parallel/check_training.py under mpirun and horovodrun."""

import re

import pytest
from launch import PARALLEL, launch

SCRIPT = PARALLEL / "check_training.py"
CASES = re.findall(r"^@case\ndef (\w+)", SCRIPT.read_text(), re.MULTILINE)
LAUNCHES = {"mpi-2": ["2"], "mpi-4": ["4"], "gloo-3": ["--gloo", "3"]}

pytest.importorskip("horovod.torch", reason="Horovod is not installed")
on_every_launch = pytest.mark.parametrize("ranks", LAUNCHES.values(), ids=LAUNCHES.keys())


def check(output: str, cases: list[str]) -> None:
    assert cases
    for name in cases:
        assert re.search(rf"(^|>:)ok {name}$", output, re.MULTILINE), f"{name} did not finish:\n{output[-3000:]}"


@on_every_launch
def test_training_on_real_horovod(ranks):
    check(launch("run.sh", [*ranks, str(SCRIPT)], timeout=420), [name for name in CASES if name != "checkpoint"])


@on_every_launch
def test_a_checkpoint_resumes_bit_exactly(ranks):
    output = launch("run.sh", [*ranks, str(SCRIPT), "checkpoint"], timeout=120, HOROVOD_FUSION_THRESHOLD="0")
    check(output, ["checkpoint"])
