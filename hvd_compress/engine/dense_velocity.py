"""The momentum of gradients that are not compressed, for methods that keep the momentum of compressed ones."""

import torch
from torch import Tensor

from ..reference import usable
from .engine import Engine
from .state import OptionalTensor, Tree


class DenseVelocity:
    """A plain velocity for each uncompressed parameter: float32, or float64 for one of that dtype."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._velocities: dict[str, Tensor] = {}

    def update(self, number: int, grad: Tensor, momentum: float, sign: bool = False) -> None:
        """Replaces the averaged gradient of parameter ``number`` by ``momentum * velocity + gradient``, or by its
        ``sign``. Entries that are not usable stay in the gradient, for the user to see, and do not enter the velocity.
        """
        engine, name = self._engine, self._engine.names[number]
        velocity = self._velocities.get(name)
        if velocity is None:
            wide = torch.promote_types(engine.parameters[number].dtype, torch.float32)
            velocity = self._velocities[name] = torch.zeros_like(grad, dtype=wide)
        scaled = engine.scale != 1.0
        step = grad.to(velocity.dtype) / engine.scale if scaled else grad.to(velocity.dtype)
        fits, new = usable(step), (velocity * momentum).add_(step)
        torch.where(fits, new, velocity, out=velocity)
        applied = new.sign() if sign else new
        grad.copy_(torch.where(fits, applied * engine.scale if scaled else applied, grad))

    def restart(self) -> None:
        """The set of ranks has changed: new ranks have no velocity, so replicas would diverge."""
        self._velocities.clear()

    def state(self) -> Tree:
        """The saved state, by parameter name."""
        compressed = {place.segment.name for place in self._engine.places}
        named = zip(self._engine.names, self._engine.parameters, strict=True)
        like = {n: p.to(torch.promote_types(p.dtype, torch.float32)) for n, p in named if n not in compressed}
        return {name: OptionalTensor(self._velocities, name, p.detach()) for name, p in like.items()}
