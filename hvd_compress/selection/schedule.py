"""Density schedules: functions of the step, for ``density=``.

A schedule returns the share of the entries that is sent in a step, in (0, 1]. It must be the same on all ranks, and
constant over many steps: each change is a new shape on the wire.
"""

from collections.abc import Callable
from typing import TypeAlias

from ..engine.arguments import check_integer, check_number

#: From the number of a step, counted from 0, to its density.
Density: TypeAlias = Callable[[int], float]


def check_density(density: float) -> float:
    """``density``, in (0, 1]. Raises as :func:`check_number`."""
    return check_number("density", density, above=0, at_most=1)


def warm_up(density: float, steps: int) -> Density:
    """Density 1/4, 1/16, 1/64, ... down to ``density``, in stages of equal length over ``steps`` steps (Lin et al.,
    DGC, ICLR 2018).

    Example::

        density = hvd_compress.schedule.warm_up(1 / 64, steps=100)
        compression = hvd_compress.IWP(model, density)

    Raises ``ValueError`` if ``density`` is outside (0, 1] or ``steps`` is negative, ``TypeError`` for other types.
    """
    density, steps = check_density(density), check_integer("steps", steps, 0)
    stages, stage = [], 0.25
    while stage > density * 1.001:
        stages.append(stage)
        stage /= 4
    return lambda step: stages[step * len(stages) // steps] if step < steps and stages else density
