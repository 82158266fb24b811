"""scripts/experiments/timeline.py and the traces it reads."""

import json
from functools import partial

import pytest
import timeline
from experiment import trace
from harness import gradients, replicas, together

from hvd_compress import IWP


def span(row, name, begin, end):
    return {"tid": row, "name": name, "ts": 1e3 * begin, "dur": 1e3 * (end - begin), "ph": "X", "pid": 0}


def test_messages_are_hidden_as_long_as_backward_goes_on():
    spans = [
        span("model", "step", 0, 0),
        span("model", "forward", 0, 99),
        span("model", "step", 98, 98),
        span("model", "forward", 98, 99),  # a first pass
        span("model", "backward", 99, 100),
        span("model", "forward", 100, 110),
        span("model", "backward", 110, 130),
        span("compressor", "compress", 112, 115),
        span("bucket 0", "allgather indices, 1.0 kB", 115, 120),
        span("bucket 0", "allreduce values, 1.0 kB", 120, 134),
        span("bucket 1", "allgather indices, 1.0 kB", 131, 137),
        span("compressor", "decompress", 131, 138),
        span("model", "synchronize and update", 130, 140),
    ]
    found = timeline.figures(timeline.last_step(spans))
    assert found == {
        "forward": 11,
        "backward": 21,
        "synchronize and update": 10,
        "compress, in backward": 3,
        "in flight": 25,
        "hidden": 15,
        "exposed": 7,
        "whole step": 42,
    }


def test_a_trace_has_every_call_and_every_message_of_its_steps(tmp_path):
    world, ranks = replicas(2, partial(IWP, bucket_mb=0.02))
    seen = trace.Trace(range(1, 3))
    seen.watch(ranks[0].compression)
    for step in range(4):
        seen.step(step)
        with seen.span(trace.Trace.MODEL, "forward"):
            pass
        with seen.span(trace.Trace.MODEL, "backward"):
            together(world, ranks, [gradients(r.model, seed=10 * step + r.rank) for r in ranks])
    seen.write(tmp_path / "trace.json")
    spans = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(s["name"] == "forward" for s in spans) == sum(s["name"] == "step" for s in spans) == 2
    step = timeline.last_step(spans)
    parameters, buckets = len(list(ranks[0].model.parameters())), len(ranks[0].compression.buckets)
    names = list(zip(step["row"], step["name"].str.partition(",")[0], strict=True))
    assert buckets > 1
    for name in ("compress", "decompress"):
        assert names.count(("compressor", name)) == parameters
    for bucket in range(buckets):
        assert names.count((f"bucket {bucket}", "allgather indices")) == 1
        assert names.count((f"bucket {bucket}", "allreduce values")) == 1
    assert timeline.figures(step)["in flight"] > 0
    timeline.plot(step, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").stat().st_size > 1000


def test_says_when_there_is_no_step():
    with pytest.raises(ValueError, match="no step"):
        timeline.last_step([])
