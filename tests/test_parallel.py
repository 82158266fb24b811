"""Real Horovod, real ranks: every method through parallel/check_training.py, under mpirun and horovodrun."""

import re
import sys

import pytest
from launch import PARALLEL, launch
from methods import EXACT, METHODS

pytest.importorskip("horovod.torch", reason="Horovod is not installed")
sys.path.insert(0, str(PARALLEL))
from check_training import cases_of

SCRIPT = PARALLEL / "check_training.py"
LAUNCHES = {"mpi-2": ["2"], "mpi-4": ["4"], "gloo-3": ["--gloo", "3"]}
WHOLE = ("iwp", "fft", "mipd")
# Options change the exchange, not how it meets Horovod: a few cases for each.
SHORT = ("plain", "grad_scaler", "channels_last")
# The other methods share the driver with those; what is their own is their exchange.
OTHERS = ("slimdp", "mp2", "topk", "dgc", "qsgd", "terngrad")

on_every_launch = pytest.mark.parametrize("ranks", LAUNCHES.values(), ids=LAUNCHES.keys())


def run(ranks: list[str], plan: dict[str, list[str]], timeout: float, **environment: str) -> None:
    """Runs cases by method, and checks that every one of them says it is done."""
    arguments = [f"{method}:{','.join(cases)}" for method, cases in plan.items()]
    output = launch("run.sh", [*ranks, str(SCRIPT), *arguments], timeout, **environment)
    for method, cases in plan.items():
        assert cases
        for case in cases:
            done = re.search(rf"(^|>:)ok {method} {case}$", output, re.MULTILINE)
            assert done, f"{method} {case} did not finish:\n{output[-3000:]}"


def test_a_process_alone_trains_as_without_compression():
    assert "ok alone" in launch("run.sh", ["1", str(PARALLEL / "check_alone.py")], timeout=60)


@on_every_launch
@pytest.mark.parametrize("method", WHOLE)
def test_training_on_real_horovod(ranks, method):
    run(ranks, {method: cases_of(method)}, timeout=420)


@on_every_launch
@pytest.mark.parametrize("case", SHORT)
def test_every_option_on_real_horovod(ranks, case):
    options = [method for method in METHODS if method not in (*WHOLE, *OTHERS)]
    run(ranks, {method: [case] for method in options}, timeout=420)


@on_every_launch
@pytest.mark.parametrize("method", OTHERS)
def test_every_other_method_on_real_horovod(ranks, method):
    # A step of ranks that share two cores takes 20 ms and more: where they are two, it is a few.
    cases = [*SHORT, "thousand_steps" if ranks == LAUNCHES["mpi-2"] else "hundreds_of_steps"]
    cases += ["dense_at_density_one"] if method in EXACT else []
    cases += ["local_steps"] if method == "slimdp" else []
    run(ranks, {method: cases}, timeout=420)


@on_every_launch
def test_a_checkpoint_resumes_bit_exactly(ranks):
    methods = (*WHOLE, *OTHERS, "iwp-lanes4", "iwp-lloyd4", "fft-gather", "mipd-compensated")
    # See there why not with fusion.
    plan = {method: ["checkpoint"] for method in methods}
    run(ranks, plan, timeout=240, HOROVOD_FUSION_THRESHOLD="0")
