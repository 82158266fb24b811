"""Every method on two real ranks of each host: conservation, a skipped step, and the same bits under both hosts."""

import pytest
import torch
from cases import is_demo
from launch import run_cases
from methods import METHODS, TRAINED
from models import equal

CASES = ("plain", "bits")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return tmp_path_factory.mktemp("bits")


def run(ranks, saved, scaled):
    """``scaled``: the methods that also skip a step."""
    plan = {method: [*CASES, *(["signs", "orthogonal"] if is_demo(method) else [])] for method in METHODS}
    for method in scaled:
        plan[method] += ["grad_scaler"]
    run_cases(ranks, plan, timeout=420, steps=8, HVD_COMPRESS_TEST_BITS=str(saved))


def test_every_method_under_ddp(saved):
    run(["--ddp", "2"], saved, scaled=METHODS)


def test_every_method_under_horovod(saved):
    run(["2"], saved, scaled=TRAINED)


def test_both_hosts_give_the_same_bits(saved):
    """A sum of two floats does not depend on their order, so this holds for all codecs."""
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    for method in METHODS:
        for rank in range(2):
            ours, theirs = (torch.load(saved / f"{host}-{method}-{rank}.pt") for host in ("ddp", "horovod"))
            assert len(ours) > 10 and equal(ours, theirs), method
