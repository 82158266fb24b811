"""Training on real Horovod ranks, under mpirun and horovodrun."""

import pytest
from launch import PARALLEL, launch, run_cases
from methods import EXACT, METHODS, TRAINED

pytest.importorskip("horovod.torch", reason="Horovod is not installed")
import common_cases
import horovod_cases
from cases import names_of

LAUNCHES = {"mpi-2": ["2"], "mpi-4": ["4"], "gloo-3": ["--gloo", "3"]}
#: One method of each kind of exchange and selection: all cases. The options of these methods change the exchange only.
WHOLE = ("iwp", "fft", "mipd")
OTHERS = tuple(name for name in TRAINED if name not in WHOLE)
FEW = ("plain", "grad_scaler", "channels_last")

on_every_launch = pytest.mark.parametrize("ranks", LAUNCHES.values(), ids=LAUNCHES.keys())


def all_cases(method):
    return names_of({**common_cases.CASES, **horovod_cases.CASES}, method)


def test_one_process_trains_as_without_compression():
    assert "ok alone" in launch("run.sh", ["1", str(PARALLEL / "check_alone.py")], timeout=120)


def test_all_cases_with_mpi():
    plan = {name: ["accumulation", "bfloat16_parameters"] for name in OTHERS}
    plan["slimdp"] += ["local_steps"]
    plan["demo"] += ["local_steps_of_two_optimizers", "local_steps_in_flight"]
    plan = {"iwp": [*all_cases("iwp"), "local_steps"], **plan}
    run_cases(["2"], plan, timeout=300, steps=6)


def test_three_ranks_with_gloo():
    names = ("iwp", "iwp-lloyd4", "fft-gather", "mipd", "mp2", "terngrad", "powersgd")
    plan = {name: ["plain"] for name in names}
    for name in ("iwp", "fft-gather", "mp2"):
        plan[name] += ["process_set"]
    plan["mipd"] += ["local_steps"]
    plan["iwp"] += ["overlapping_process_sets", "local_steps_of_two_optimizers", "local_steps_in_flight"]
    run_cases(["--gloo", "3"], plan, timeout=400, steps=4)


def test_two_nodes():
    """Fewer methods than under DDP: their two levels are the same."""
    plan = {name: ["plain"] for name in ("mipd", "demo", "powersgd", "none")}
    for name in ("iwp", "fft-gather"):
        plan[name] = ["plain", "grad_scaler", "accumulation"]
    plan["iwp"] += ["nodes", "dense_at_density_one", "momentum_taken_over"]
    plan["demo"] += ["signs"]
    run_cases(["4"], plan, timeout=420, steps=3, nodes=2)


def test_two_nodes_with_gloo():
    plan, patient = {"iwp": ["plain", "nodes_after_a_new_init"]}, {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "200"}
    run_cases(["--gloo", "4"], plan, timeout=240, steps=4, nodes=2, **patient)  # the last case has dynamic sets


@pytest.mark.slow
@pytest.mark.parametrize("method", TRAINED)
def test_all_cases_on_two_nodes(method):
    plan = {method: names_of(common_cases.CASES, method)}
    run_cases(["4"], plan, timeout=600, steps=12, nodes=2, HOROVOD_FUSION_THRESHOLD="0")


@pytest.mark.slow
@on_every_launch
@pytest.mark.parametrize("method", WHOLE)
def test_all_cases(ranks, method):
    run_cases(ranks, {method: [*all_cases(method), "local_steps", "thousand_steps"]}, timeout=600)


@pytest.mark.slow
@on_every_launch
@pytest.mark.parametrize("case", FEW)
def test_every_option(ranks, case):
    options = [method for method in METHODS if method not in (*WHOLE, *OTHERS)]
    run_cases(ranks, {method: [case] for method in options}, timeout=600)


@pytest.mark.slow
@on_every_launch
@pytest.mark.parametrize("method", OTHERS)
def test_every_other_method(ranks, method):
    # More ranks than cores: fewer steps.
    cases = [*FEW, "thousand_steps" if ranks == ["2"] else "hundreds_of_steps"]
    cases += ["dense_at_density_one"] if method in EXACT else []
    run_cases(ranks, {method: [*cases, "local_steps", "local_steps_in_flight"]}, timeout=600)
