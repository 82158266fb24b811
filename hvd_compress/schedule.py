"""Density over time."""

from dataclasses import dataclass


@dataclass(frozen=True)
class WarmUp:
    """Density 1/4, 1/16, 1/64, ... down to ``density``, in stages of equal length over ``steps`` steps (Lin et al.,
    DGC, 2018).

    Raises ``ValueError`` where ``density`` is outside (0, 1] or ``steps`` is negative.
    """

    density: float
    steps: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.density <= 1.0:
            raise ValueError(f"density must lie in (0, 1], got {self.density}")
        if self.steps < 0:
            raise ValueError(f"warmup_steps must not be negative, got {self.steps}")

    def __call__(self, step: int) -> float:
        """The density of step ``step``, counted from 0."""
        stages = []
        stage = 0.25
        while stage > self.density * 1.001:
            stages.append(stage)
            stage /= 4
        if step >= self.steps or not stages:
            return self.density
        return stages[step * len(stages) // self.steps]
