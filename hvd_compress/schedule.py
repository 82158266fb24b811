"""Density schedules, for ``density=``."""

from .selection.schedule import Density, Diminishing, WarmUp
