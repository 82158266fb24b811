"""Momentum correction: the momentum of the user's optimizer, applied before compression (Lin et al., DGC, ICLR 2018).

The optimizer's own momentum would see an entry only when it is sent, late and all at once. With momentum correction
each gradient passes through a velocity first, u = momentum * u + g, the velocity is added to the residual, and entries
that are sent are cleared from u.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..engine.dense_velocity import DenseVelocity
from ..engine.engine import Engine
from ..engine.facts import OptimizerFacts
from ..engine.shards import local
from ..engine.state import Fixed, Tree
from ..guards.optimizer import check_complete, check_momentum, check_passed
from .sparse_work import SparseWork


def momentum_to_take(optimizer: Optimizer) -> float:
    """The momentum that :func:`remove_momentum` would take. Raises ``TypeError`` or ``ValueError`` if there is none."""
    if not isinstance(optimizer, torch.optim.SGD):
        raise TypeError(f"take_momentum knows the momentum of torch.optim.SGD, not of {type(optimizer).__name__}")
    groups = optimizer.param_groups
    momentum, *others = {group.get("momentum"): None for group in groups}
    if others or momentum is None:
        raise ValueError(
            f"take_momentum needs one momentum for all parameter groups, got {sorted(map(str, {momentum, *others}))}"
        )
    if any(group.get("nesterov") or group.get("dampening") for group in groups):
        raise ValueError("take_momentum knows plain momentum only: nesterov and dampening must be off")
    if not momentum:
        raise ValueError("take_momentum: the optimizer has no momentum to take (was it taken before?)")
    return float(momentum)


def remove_momentum(optimizer: Optimizer, momentum: float) -> bool:
    """Sets the optimizer's momentum to 0, drops its velocities, and scales its weight decay to keep its effect.
    Returns whether a velocity was not 0."""
    velocities = [state.pop("momentum_buffer", None) for state in optimizer.state.values()]
    for group in optimizer.param_groups:
        group["momentum"] = 0.0
        group["weight_decay"] = group.get("weight_decay", 0.0) / (1.0 - momentum)
    return any(velocity is not None and bool(local(velocity).any()) for velocity in velocities)


class MomentumCorrection(DenseVelocity):
    """The momentum of one compressor: a velocity beside each bucket's residual, and a plain one for each uncompressed
    parameter, the base class. ``works``: the buckets that this rank owns. ``momentum``: of all parameters, in [0, 1);
    0 is off, with which DeMo uses the plain ones for its own.
    """

    def __init__(self, engine: Engine, works: Sequence[SparseWork], momentum: float) -> None:
        super().__init__(engine)
        self._works = works
        self._set(momentum, engine.names if momentum else ())

    def _set(self, momentum: float, names: Iterable[str]) -> None:
        """Gives the parameters with these names the momentum, the others none."""
        self.value, self._names = momentum, set(names)
        pairs = zip(self._engine.names, self._engine.parameters, strict=True)
        self._ids = {id(parameter) for name, parameter in pairs if name in self._names}
        for work in self._works:
            work.velocity.set_momentum(momentum, self._names)

    @property
    def of_compressed(self) -> bool:
        """Whether compressed parameters have a velocity, too."""
        return self.value > 0

    def take(self, optimizer: Optimizer, alone: bool) -> float:
        """Moves the momentum of ``optimizer`` here, and returns it. It stays there if this process is ``alone``."""
        engine = self._engine
        momentum = momentum_to_take(optimizer)
        if self.value not in (0.0, momentum):
            raise ValueError(
                f"take_momentum: this compressor has a momentum of {self.value:g} already, and the optimizer's is "
                f"{momentum:g}; take equal ones"
            )
        check_complete(engine.optimizers.unknown(optimizer))
        if alone:
            self._set(0.0, ())
            return momentum
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        pairs = zip(engine.names, engine.parameters, strict=True)
        self._set(momentum, self._names | {name for name, parameter in pairs if id(parameter) in held})
        if remove_momentum(optimizer, momentum):
            engine.warn("take_momentum: the optimizer has taken steps, and its velocities are dropped")
        return momentum

    def check(self, facts: OptimizerFacts) -> None:
        """Raises ``ValueError`` if momentum would be lost or counted twice."""
        if not self.value:
            return
        groups = [group for group in facts.optimizer.param_groups if not self._ids.isdisjoint(map(id, group["params"]))]
        check_momentum(facts, self.value, groups)
        check_passed((name for name in facts.bypassing() if name in self._names), "would lose its momentum")

    def dense_averaged(self, number: int, grad: Tensor) -> None:
        """Replaces the averaged gradient of the uncompressed parameter ``number`` by its velocity."""
        if self._engine.names[number] in self._names:
            self.update(number, grad, self.value)

    def options(self) -> dict[str, object]:
        complete = len(self._names) in (0, len(self._engine.names))
        some = {} if complete else {"parameters with momentum": " ".join(sorted(self._names))}
        return {"momentum": self.value, **some}

    def saved(self) -> dict[str, Tree]:
        """The saved state, with the momentum that it depends on."""
        momentum: Tree = Fixed(self.value, "take_momentum() comes before load_state_dict()")
        return {"momentum": momentum, **({"dense_velocity": self.state()} if self.value else {})}

    def get(self, number: int) -> Tensor:
        """This rank's velocity of parameter ``number``. With nodes, one rank of a node has it, the others zeros."""
        place = self._engine.place_of[number]
        if place is None or not self.of_compressed:
            return super().get(number)
        if not isinstance(work := place.work, SparseWork):  # another rank of the node owns it
            return work.residual_of(place.piece)
        with work.bucket.order:
            return work.velocity.get(place.piece)

    def set(self, number: int, velocity: Tensor) -> None:
        """Replaces this rank's velocity of parameter ``number``."""
        place = self._engine.place_of[number]
        if place is None or not self.of_compressed:
            super().set(number, velocity)
        elif isinstance(work := place.work, SparseWork):
            with work.bucket.order:
                work.velocity.set(place.piece, velocity)
