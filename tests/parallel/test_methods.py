"""Every method on two real ranks of each host: conservation, a skipped step, and the same bits under both hosts."""

import pytest
import torch
from cases import is_demo
from launch import run_cases
from methods import KINDS, METHODS, TRAINED
from models import equal

CASES = ("plain", "bits")
OF_KINDS = [name for name in METHODS if name in KINDS]
#: The others have a kind's exchange with other values.
every_method = pytest.mark.parametrize(
    "names",
    [OF_KINDS, pytest.param([name for name in METHODS if name not in KINDS], marks=pytest.mark.slow)],
    ids=["kinds", "others"],
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return tmp_path_factory.mktemp("bits")


def run(ranks, saved, names, scaled):
    """``scaled``: the methods that also skip a step."""
    plan = {method: [*CASES, *(["signs", "orthogonal"] if is_demo(method) else [])] for method in names}
    for method in scaled:
        plan[method] += ["grad_scaler"]
    run_cases(ranks, plan, timeout=420, steps=5, HVD_COMPRESS_TEST_BITS=str(saved))


@every_method
def test_every_method_under_ddp(saved, names):
    run(["--ddp", "2"], saved, names, scaled=names)


@every_method
def test_every_method_under_horovod(saved, names):
    run(["2"], saved, names, scaled=[name for name in names if name in TRAINED])


@every_method
def test_both_hosts_give_the_same_bits(saved, names):
    """A sum of two floats does not depend on their order, so this holds for all codecs."""
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    for method in names:
        for rank in range(2):
            ours, theirs = (torch.load(saved / f"{host}-{method}-{rank}.pt") for host in ("ddp", "horovod"))
            assert len(ours) > 10 and equal(ours, theirs), method
