"""The momentum of gradients that are not compressed, for methods that keep the momentum of compressed ones."""

import torch
from torch import Tensor

from ..reference import usable
from .dense import as_real
from .engine import Engine
from .shards import wide_zeros
from .state import OptionalTensor, Tree


class DenseVelocity:
    """A plain velocity for each uncompressed parameter: float32, or float64 for one of that dtype."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._velocities: dict[str, Tensor] = {}
        #: Those that the last average has changed, before that; None without one. And the number of exchanges with it.
        self._before: dict[str, Tensor | None] = {}
        self._number = -1

    def get(self, number: int) -> Tensor:
        """The velocity of parameter ``number``: zeros before its first gradient."""
        found = self._velocities.get(self._engine.names[number])
        return as_real(wide_zeros(self._engine.parameters[number])) if found is None else found

    def set(self, number: int, velocity: Tensor) -> None:
        """Replaces the velocity of parameter ``number``."""
        self._velocities[self._engine.names[number]] = as_real(wide_zeros(velocity)).copy_(as_real(velocity))

    def update(self, number: int, grad: Tensor, momentum: float, sign: bool = False) -> None:
        """Replaces the averaged gradient of parameter ``number`` by ``momentum * velocity + gradient``, or by its
        ``sign``. While no rank has a gradient, it stays 0, and the velocity as it is. Entries that are not usable stay
        in the gradient, for the user to see, and do not enter the velocity.
        """
        engine = self._engine
        if self._number != engine.step:
            self._before, self._number = {}, engine.step
        name, velocity = engine.names[number], self.get(number)
        self._before[name] = self._velocities.get(name)
        scale = engine.dense.scale
        step = grad.to(velocity.dtype) / scale if scale != 1.0 else grad.to(velocity.dtype)
        fits, new = usable(step) & step.any(), (velocity * momentum).add_(step)
        self._velocities[name] = torch.where(fits, new, velocity)
        applied = new.sign() if sign else new
        grad.copy_(torch.where(fits, applied * scale if scale != 1.0 else applied, grad))

    def undo(self) -> None:
        """Restores the velocities before the last average. Does nothing if that has changed none so far."""
        for name, velocity in self._before.items() if self._number == self._engine.step else ():
            if velocity is None:
                del self._velocities[name]
            else:
                self._velocities[name] = velocity
        self._before = {}

    def restart(self) -> None:
        """The set of ranks has changed: new ranks have no velocity, so replicas would diverge."""
        self._velocities.clear()
        self._before = {}

    def state(self) -> Tree:
        """The saved state, by parameter name."""
        named = zip(self._engine.names, self._engine.parameters, self._engine.place_of, strict=True)
        return {
            n: OptionalTensor(self._velocities, n, as_real(wide_zeros(p))) for n, p, place in named if place is None
        }
