"""Density over time."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch.optim import Optimizer


@runtime_checkable
class Density(Protocol):
    """The share of the entries that is sent in a step: the same on all ranks, and the same for many steps on end."""

    def __call__(self, step: int) -> float:
        """The density of step ``step``, counted from 0: in (0, 1]."""

    def restart(self) -> None:
        """The ranks were formed anew: forget what new ones cannot know."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint must carry."""

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state`."""


def check_density(density: float) -> None:
    """Raises ``ValueError`` where ``density`` is none."""
    if not 0.0 < density <= 1.0:
        raise ValueError(f"density must lie in (0, 1], got {density}")


@dataclass(frozen=True)
class WarmUp:
    """Density 1/4, 1/16, 1/64, ... down to ``density``, in stages of equal length over ``steps`` steps (Lin et al.,
    DGC, 2018).

    Raises ``ValueError`` where ``density`` is outside (0, 1] or ``steps`` is negative.
    """

    density: float
    steps: int = 0

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.steps < 0:
            raise ValueError(f"warmup_steps must not be negative, got {self.steps}")

    def __call__(self, step: int) -> float:
        stages = []
        stage = 0.25
        while stage > self.density * 1.001:
            stages.append(stage)
            stage /= 4
        if step >= self.steps or not stages:
            return self.density
        return stages[step * len(stages) // self.steps]

    def __str__(self) -> str:
        return f"1/{1 / self.density:g}" + (f", warm-up {self.steps} steps" if self.steps else "")

    def restart(self) -> None:
        """There is nothing."""

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """There is none."""


class Diminishing:
    """What is dropped shrinks with the learning rate: ``1 - density(t) = (1 - density) lr(t) / max lr`` (the
    diminishing compression ratio of Wang et al., HPDC 2020, with which SGD keeps its rate).

    The density rises to 1 as the rate falls to 0, and so do the bytes. It moves in steps of a factor 2**(1/2), since
    every change is a new shape on the wire.

    Args:
        density: at the highest learning rate, in (0, 1].
        rate: the learning rate: a function, or an optimizer, whose first parameter group's ``lr`` counts; the same on
            all ranks. Horovod's optimizer, once it has loaded a state, has other groups than the one it wraps, which
            then stand still: give a function where states are loaded, as ``lambda: optimizer.param_groups[0]["lr"]``.
    """

    def __init__(self, density: float, rate: Optimizer | Callable[[], float]) -> None:
        check_density(density)
        self.density, self._highest = density, 0.0
        self._rate = (lambda: rate.param_groups[0]["lr"]) if isinstance(rate, Optimizer) else rate

    def __call__(self, step: int) -> float:
        rate = float(self._rate())
        self._highest = max(self._highest, rate)
        if rate == 0.0 and self._highest:
            return 1.0
        kept = 1.0 - (1.0 - self.density) * (rate / self._highest if self._highest else 1.0)
        halvings = math.floor(2 * math.log2(kept / self.density) + 1e-6) / 2
        return min(self.density * math.pow(2.0, halvings), 1.0)

    def __str__(self) -> str:
        return f"1/{1 / self.density:g} and more as the learning rate falls"

    def restart(self) -> None:
        self._highest = 0.0

    def state(self) -> dict[str, Any]:
        return {"highest": self._highest}

    def load_state(self, state: dict[str, Any]) -> None:
        self._highest = state["highest"]
