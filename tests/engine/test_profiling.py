"""The ranges that a user's profile shows."""

from collections import Counter
from functools import partial

import pytest
import torch
from harness import HOSTS, replicas
from models import compressed, gradients

from hvd_compress import IWP, PowerSGD
from hvd_compress.engine.profiling import stage


def ranges(host, build):
    """The ranges of one step of one rank, in a model of several buckets; and that rank."""
    _, (rank,) = replicas(1, build, host=host, bucket_mb=0.03)
    rank.exchange(gradients(rank.model, seed=0))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        rank.exchange(gradients(rank.model, seed=1))
    rank.exchange(gradients(rank.model, seed=2))  # outside the profile
    return [e for e in profile.events() if e.name.startswith("hvd_compress.")], rank


def uncompressed_buckets(rank):
    """DDP's buckets with gradients that are not compressed: they are summed together."""
    buckets = rank.buckets(gradients(rank.model, seed=1))
    return sum(any(not compressed(p) for p in bucket.parameters()) for bucket in buckets)


@pytest.mark.parametrize("host", HOSTS)
def test_every_stage_of_a_step_is_in_the_profile(host):
    events, rank = ranges(host, IWP)
    count, model = Counter(e.name.removeprefix("hvd_compress.") for e in events), rank.model
    buckets, parameters = len(rank.compression.buckets), list(model.parameters())
    assert buckets > 1
    assert count.pop("accumulate") == sum(compressed(p) for p in parameters)
    assert {name: count.pop(name) for name in ("select", "encode", "apply")} == dict.fromkeys(
        ("select", "encode", "apply"), buckets
    )
    # Of torch: sums of values, and of uncompressed gradients, are made of parts.
    dense = uncompressed_buckets(rank) if host == "ddp" else 0
    assert count.pop("exchange") == (3 * buckets + 2 * dense if dense else 2 * buckets)  # indices, values
    assert count.pop("wait") >= (3 * buckets + 2 * dense if dense else 1)
    assert count.pop("reduce", 0) == (buckets + dense if dense else 0)
    assert count.pop("dense") >= 2
    assert not count


def test_ranges_do_not_contain_one_another():
    """So that their times can be added. Time in operators is inside the ranges."""
    events, _ = ranges("ddp", IWP)
    for event in events:
        parent = event.cpu_parent
        while parent is not None:
            assert not parent.name.startswith("hvd_compress."), (event.name, parent.name)
            parent = parent.cpu_parent
    assert any("accumulate_select" in child.name for e in events for child in e.cpu_children)


@pytest.mark.parametrize("build, middle", [(partial(IWP, values="lloyd4"), "reduce"), (PowerSGD, "encode")])
def test_methods_of_several_collectives_have_a_stage_between(build, middle):
    events, rank = ranges("ddp", build)
    count = Counter(e.name.removeprefix("hvd_compress.") for e in events)
    sums = uncompressed_buckets(rank) if middle == "reduce" else 0
    assert count[middle] - sums == count["apply"] == len(rank.compression.buckets)


def test_without_a_profiler_nothing_is_recorded():
    assert stage("wait") is stage("apply")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert stage("wait") is not stage("wait")
    assert stage("wait") is stage("apply")
