"""Density schedules: functions of the step, for ``density=``.

A schedule returns the share of the entries that is sent in a step, in (0, 1]. It must be the same on all ranks, and
constant over many steps: each change is a new shape on the wire.
"""

import math
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


def diminishing(density: float, rate: Callable[[], float], highest: float) -> Density:
    """A density that rises as the learning rate falls: ``1 - density(t) = (1 - density) rate / highest``, the
    diminishing compression ratio with which SGD keeps its convergence rate (Wang et al., HPDC 2020). It rises in steps
    of a factor sqrt(2).

    Example::

        density = hvd_compress.schedule.diminishing(1 / 64, lambda: optimizer.param_groups[0]["lr"], highest=0.1)
        compression = hvd_compress.IWP(model, density)

    Args:
        density: at the highest learning rate, in (0, 1].
        rate: returns the learning rate, the same on all ranks.
        highest: the highest learning rate of the training, above 0.

    Raises:
        TypeError: ``rate`` is no function, or another type.
        ValueError: out of range, also of the learning rate in a step.
    """
    if not callable(rate):
        raise TypeError(f"rate must be a function that returns the learning rate, got {rate!r:.80}")
    density, highest = check_density(density), check_number("highest", highest, above=0)

    def at(step: int) -> float:
        share = min(check_number("the learning rate", float(rate()), at_least=0) / highest, 1.0)
        kept = 1.0 - (1.0 - density) * share
        halvings = math.floor(2 * math.log2(kept / density) + 1e-6) / 2
        return min(density * math.pow(2.0, halvings), 1.0) if share else 1.0

    return at
