"""Metrics for loggers."""

import math

from harness import random_steps, replicas

import hvd_compress


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
