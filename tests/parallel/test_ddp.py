"""Training with torch DistributedDataParallel on real ranks, under torchrun and without Horovod."""

import common_cases
import ddp_cases
import pytest
from cases import names_of
from launch import run_cases
from methods import METHODS, TRAINED

LAUNCHES = {"ddp-2": ["--ddp", "2"], "ddp-4": ["--ddp", "4"]}
#: Launches of the whole matrix: a few methods each.
GROUPS = {name: [m for m in METHODS if m.partition("-")[0] == name] for name in TRAINED}


def all_cases(method):
    return names_of({**common_cases.CASES, **ddp_cases.CASES}, method)


def test_all_cases():
    plan = {name: ["accumulation", "bfloat16_parameters"] for name in TRAINED}
    plan["fft"] += ["local_steps"]
    plan["slimdp"] += ["local_steps"]
    plan["demo"] += ["local_steps_of_two_optimizers", "local_steps_in_flight"]
    run_cases(
        ["--ddp", "2"],
        {**plan, "iwp": [*all_cases("iwp"), "local_steps", "local_steps_in_flight"]},
        timeout=420,
        steps=6,
    )


def test_two_nodes():
    plan = {name: ["plain"] for name in TRAINED}
    for name in ("iwp", "fft-gather", "powersgd"):
        plan[name] = ["plain", "grad_scaler", "rebucketing"]
    plan["iwp"] += ["nodes", "nodes_by_launcher_and_mesh", "dense_at_density_one", "momentum_taken_over"]
    plan["iwp"] += ["local_steps_of_nodes", "low_bit_of_nodes"]
    plan["demo"] += ["signs", "orthogonal"]
    run_cases(["--ddp", "4"], plan, timeout=420, steps=4, nodes=2)


@pytest.mark.slow
@pytest.mark.parametrize("family", GROUPS)
def test_all_cases_on_two_nodes(family):
    plan = {method: names_of(common_cases.CASES, method) for method in GROUPS[family]}
    run_cases(["--ddp", "4"], plan, timeout=1200, steps=12, nodes=2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", LAUNCHES.values(), ids=LAUNCHES.keys())
@pytest.mark.parametrize("family", GROUPS)
def test_all_cases_of_every_method(ranks, family):
    plan = {method: [*all_cases(method), "local_steps", "local_steps_in_flight"] for method in GROUPS[family]}
    run_cases(ranks, plan, timeout=1200, steps=20)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", LAUNCHES.values(), ids=LAUNCHES.keys())
def test_replicas_stay_bit_equal(ranks):
    case = "thousand_steps" if ranks == ["--ddp", "2"] else "hundreds_of_steps"
    run_cases(ranks, {name: [case] for name in TRAINED}, timeout=900)
