"""Density schedules, for ``density=``."""

import math
from collections.abc import Callable

from .engine.arguments import check_number
from .selection.schedule import Density, check_density, warm_up

__all__ = ["diminishing", "warm_up"]


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
