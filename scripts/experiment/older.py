"""Results from before an option existed."""

from __future__ import annotations

from typing import Any


def complete(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a run, with what was so before it could be asked for. Not today's defaults: they may
    change, and what was run does not."""
    before: dict[str, Any] = {"extrapolate": None}
    if config["compression"] not in ("none", "fp16"):
        before |= {"dense_values": "fp32", "bucket_mb": 16.0}
    if config["compression"] == "iwp":
        before |= {"floor": 0.5, "no_block_means": True}
    return config | {key: value for key, value in before.items() if key not in config}
