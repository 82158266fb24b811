"""Training with FSDP2 on real ranks, under torchrun: two replicas of two shards."""

import fsdp_cases
import pytest
from cases import names_of
from launch import run_cases
from methods import TRAINED
from test_ddp import GROUPS

RANKS = ["--ddp", "4"]


def test_all_cases():
    """Checkpoints of IWP, DeMo and TopK are those of momentum's case."""
    short = ["replicas_stay_equal", "conservation"]
    plan = {name: short for name in ("demo", "topk", "powersgd", "none")}
    plan["fft"] = plan["powersgd"] = [*short, "distributed_checkpoint"]
    others = ("distributed_checkpoint", *fsdp_cases.PARTS)
    plan["iwp"] = [name for name in names_of(fsdp_cases.CASES, "iwp") if name not in others]
    run_cases(RANKS, plan, timeout=600, steps=3, host="fsdp")


@pytest.mark.slow
@pytest.mark.parametrize("family", GROUPS)
def test_all_cases_of_every_method(family):
    plan = {method: names_of(fsdp_cases.CASES, method) for method in GROUPS[family]}
    run_cases(RANKS, plan, timeout=1200, steps=12, host="fsdp")


@pytest.mark.slow
def test_replicas_stay_bit_equal():
    run_cases(RANKS, {name: ["hundreds_of_steps"] for name in TRAINED}, timeout=900, host="fsdp")
