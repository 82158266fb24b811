"""Density schedules: which share of the entries is sent in each step."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch.optim import Optimizer

from ..engine import state as states
from ..engine.arguments import check_integer, check_number


@runtime_checkable
class Density(Protocol):
    """A schedule: the same on all ranks, and constant over many steps (each change is a new shape on the wire)."""

    def __call__(self, step: int) -> float:
        """The density of step ``step``, counted from 0: in (0, 1]."""

    def restart(self) -> None:
        """The set of ranks has changed (elastic): forget what new ranks cannot know."""
        return

    def state_dict(self) -> dict[str, Any]:
        """The schedule's state, for checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`. Raises an error for a state that does not fit."""
        if state:
            raise ValueError(f"{type(self).__name__} has no state, got {states.described(state)}")


def check_density(density: float) -> float:
    """``density``, in (0, 1]. Raises as :func:`check_number`."""
    return check_number("density", density, above=0, at_most=1)


@dataclass(frozen=True)
class WarmUp(Density):
    """Density 1/4, 1/16, 1/64, ... down to ``density``, in stages of equal length over ``steps`` steps (Lin et al.,
    DGC, ICLR 2018).

    Example::

        density = hvd_compress.schedule.WarmUp(1 / 64, steps=100)
        compression = hvd_compress.IWP(model, density)

    Raises ``ValueError`` if ``density`` is outside (0, 1] or ``steps`` is negative, ``TypeError`` for other types.
    """

    density: float
    steps: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "density", check_density(self.density))
        object.__setattr__(self, "steps", check_integer("steps", self.steps, 0))

    def __call__(self, step: int) -> float:
        stages = []
        stage = 0.25
        while stage > self.density * 1.001:
            stages.append(stage)
            stage /= 4
        if step >= self.steps or not stages:
            return self.density
        return stages[step * len(stages) // self.steps]


class Diminishing(Density):
    """What is dropped shrinks with the learning rate: ``1 - density(t) = (1 - density) lr(t) / max lr``, the
    diminishing compression ratio with which SGD keeps its convergence rate (Wang et al., HPDC 2020).

    Density and bytes rise as the learning rate falls, in steps of a factor sqrt(2).

    Example::

        density = hvd_compress.schedule.Diminishing(1 / 64, optimizer)
        compression = hvd_compress.IWP(model, density)

    Args:
        density: at the highest learning rate, in (0, 1].
        rate: the learning rate, the same on all ranks: a function, or an optimizer, of which the first parameter
            group's ``lr`` is used. Horovod's optimizer has its own groups after loading a state, and those of the
            optimizer that it wraps no longer change: then give a function,
            ``lambda: optimizer.param_groups[0]["lr"]``.
    """

    def __init__(self, density: float, rate: Optimizer | Callable[[], float]) -> None:
        if not isinstance(rate, Optimizer) and not callable(rate):
            raise TypeError(f"rate must be an optimizer or a function that returns the learning rate, got {rate!r:.80}")
        self.density, self._highest = check_density(density), 0.0
        self._rate = (lambda: rate.param_groups[0]["lr"]) if isinstance(rate, Optimizer) else rate

    def __call__(self, step: int) -> float:
        rate = check_number("the learning rate", float(self._rate()), at_least=0)
        self._highest = max(self._highest, rate)
        if rate == 0.0 and self._highest:
            return 1.0
        kept = 1.0 - (1.0 - self.density) * (rate / self._highest if self._highest else 1.0)
        halvings = math.floor(2 * math.log2(kept / self.density) + 1e-6) / 2
        return min(self.density * math.pow(2.0, halvings), 1.0)

    def restart(self) -> None:
        self._highest = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"highest": self._highest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        description: states.Tree = {"highest": states.Entry(vars(self), "_highest", float, low=0.0)}
        states.check(description, state)
        states.load(description, state)
