"""Metrics for loggers."""

import math

import pytest
from harness import random_steps, replicas

import hvd_compress


class Writer:
    def __init__(self):
        self.written = {}

    def add_scalar(self, name, value, step):
        self.written[name, step] = value


def test_metrics_are_stats_as_finite_numbers():
    world, ranks = replicas(2, hvd_compress.IWP)
    random_steps(world, ranks, range(3))
    compression = ranks[1].compression
    stats, metrics = compression.stats(), compression.metrics()
    for key, value in stats["last"].items():
        assert metrics.pop(f"hvd_compress/{key}") == value
    for key, value in stats["total"].items():
        assert metrics.pop(f"hvd_compress/total_{key}") == value
    assert stats["last"]["wire_bytes"] * 2 < stats["total"]["wire_bytes"]
    assert metrics == {
        "hvd_compress/steps": 3,
        "hvd_compress/residual_norm": stats["residual_norm"],
        "hvd_compress/compress_ms": stats["compress_ms"],
    }


def test_a_ratio_of_nothing_is_missing():
    _, (rank,) = replicas(1, hvd_compress.IWP)
    metrics = rank.compression.metrics()
    assert "hvd_compress/wire_ratio" not in metrics and metrics["hvd_compress/wire_bytes"] == 0
    assert all(type(value) is float and math.isfinite(value) for value in metrics.values())


def test_log_to_a_writer():
    world, ranks = replicas(2, hvd_compress.PowerSGD)
    random_steps(world, ranks, range(2))
    compression, writer = ranks[0].compression, Writer()
    compression.log_to(writer, 70)
    assert writer.written == {(name, 70): value for name, value in compression.metrics().items()}
    assert len(writer.written) > 10


def test_log_to_tensorboard(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    world, ranks = replicas(2, hvd_compress.IWP)
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        for step in range(3):
            random_steps(world, ranks, [step])
            ranks[0].compression.log_to(writer, 10 * step)
    read = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in read.Scalars("hvd_compress/wire_bytes")] == [0, 10, 20]
    assert read.Scalars("hvd_compress/steps")[-1].value == 3


def test_a_writer_without_add_scalar_is_refused():
    _, (rank,) = replicas(1, hvd_compress.IWP)
    with pytest.raises(TypeError, match="add_scalar"):
        rank.compression.log_to(print, 0)
