"""How many trips between distant ranks a step waits for, one after another."""

import pytest
from harness import random_steps, replicas
from local_workers import workers
from methods import METHODS
from optimizers import muon_and_adamw

from hvd_compress import NoCompression, Quantized
from hvd_compress.carriers.threads import ThreadCollectives
from hvd_compress.cli.methods import METHODS as ESTIMATED

#: Of a collective whose messages go from each rank to each other one. A sum is scattered, and its parts are gathered.
TRIPS = {"allgather": 1, "alltoall": 1, "allreduce": 2}
#: The methods by the trips of a step: one that adds a trip makes a step between sites slower by the delay of a link.
STEPS = {
    2: """iwp-range10-gather iwp-fp16-gather fft-gather-bitmap topk-range8 quantized-1 quantized-8 quantized-forgetful
        qsgd-feedback none none-fp16""",
    3: """iwp-fp16 iwp-fp32 iwp-one-leader iwp-no-means iwp-sparse iwp-half iwp-dense-fp16 iwp-lanes2 iwp-lanes16
        iwp-range8 iwp-lloyd1 mipd-whole mp2-guessing mp2-silent terngrad-feedback""",
    # All but the first exchange budgets in this step, too.
    4: "powersgd-fp32 iwp-lanes4 iwp-lloyd4 fft-range10 demo-range8 mipd-lloyd4 slimdp-fp32",
}
STEPS = {name: trips for trips, names in STEPS.items() for name in names.split()}
#: With their defaults, by their names in ``hvd-compress estimate``, which has their trips.
DEFAULTS = {"Quantized": "quantized", "DeMo, gather": "demo-gather", "FFT, gather": "fft-gather"}
DEFAULTS |= {
    name: name.lower()
    for name in ["DeMo", "IWP", "FFT", "MIPD", "SlimDP", "MP2", "TopK", "DGC", "PowerSGD", "QSGD", "TernGrad"]
}
STEPS |= {name: ESTIMATED[known].trips for known, name in DEFAULTS.items()}
LOCAL = {
    "low_bit": (dict(build=Quantized, restore_length=True), ESTIMATED["low_bit"].trips),
    "low_bit with a delay": (dict(build=Quantized, restore_length=True, delay=1), 2),
    "low_bit on averaged gradients": (
        dict(build=Quantized, restore_length=True, optimizer=muon_and_adamw, averaged=[1], unsent="buffer"),
        ESTIMATED["low_bit"].trips,
    ),
    "diloco": (dict(build=NoCompression), 2),
    "sparse": (dict(), 2),
}


@pytest.fixture
def clocks(monkeypatch):
    """The trips that each rank has waited for: with a delay of 1, and no other time, the time on its clock."""
    now, begun = {}, {}
    start = ThreadCollectives.start

    def counted(self, request, name):
        key, rank = (self._members, self._started), self._number
        handle = start(self, request, name)
        begun.setdefault(key, []).append(now.setdefault(rank, 0))
        result = handle.result

        def wait(*timeout):
            found = result(*timeout)
            now[rank] = max(now[rank], max(begun[key]) + TRIPS[request.verb])
            return found

        handle.result = wait
        return handle

    monkeypatch.setattr(ThreadCollectives, "start", counted)
    return now


def waited(clocks, step):
    """The trips of a step, the same on all ranks."""
    before = dict(clocks)
    step()
    (trips,) = {clocks[rank] - before[rank] for rank in before}
    return trips


@pytest.mark.parametrize(("name", "trips"), STEPS.items())
def test_trips_of_a_step_of_gradients(clocks, name, trips):
    world, ranks = replicas(3, METHODS[name], host="ddp")
    random_steps(world, ranks, range(2))  # the first compares options
    assert waited(clocks, lambda: random_steps(world, ranks, [2])) == trips


def test_every_method_has_its_trips():
    assert {*STEPS} == {*METHODS}


@pytest.mark.parametrize(("options", "trips"), LOCAL.values(), ids=LOCAL)
def test_trips_of_a_round_of_local_steps(clocks, options, trips):
    world, group = workers(3, ordered=True, period=2, **options)
    world.run(lambda rank: group[rank].train(5))
    assert waited(clocks, lambda: world.run(lambda rank: group[rank].train(2, first=5))) == trips
