"""Density schedules, for ``density=``."""

from .selection.schedule import diminishing, warm_up

__all__ = ["diminishing", "warm_up"]
