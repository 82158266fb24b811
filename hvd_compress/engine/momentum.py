"""Momentum correction: the momentum of the user's optimizer, applied before compression (Lin et al., DGC, ICLR 2018).

The optimizer's own momentum would see an entry only when it is sent, late and all at once. With momentum correction
each gradient passes through a velocity first, u = momentum * u + g, the velocity is added to the residual, and entries
that are sent are cleared from u.
"""

import torch
from torch import Tensor
from torch.optim import Optimizer

from .dense_velocity import DenseVelocity
from .engine import Engine
from .modes import modes_off
from .state import Fixed, Tree


class MomentumCorrection:
    """The momentum of one compressor: a bucket state ``velocity`` beside each residual, and a plain velocity for each
    parameter that is not compressed.

    Args:
        engine: of the compressor.
        momentum: in [0, 1); 0 is off.
    """

    def __init__(self, engine: Engine, momentum: float) -> None:
        self._engine = engine
        self.value = 0.0
        # The momentum that take() left in the optimizer because this process does not exchange gradients.
        self._left = 0.0
        self._dense = DenseVelocity(engine)
        #: Velocities outside the buckets' state, to be zeroed when the correction ends.
        self.other_velocities: list[Tensor] = []
        if momentum:
            self._enable(momentum)

    @modes_off
    def take(self, optimizer: Optimizer) -> float:
        """See :meth:`hvd_compress.methods.sparse.SparseMethod.take_momentum`."""
        if self._engine.local_steps is not None:
            raise ValueError("take_momentum: with LocalSteps, momentum stays in the optimizer")
        if not isinstance(optimizer, torch.optim.SGD):
            raise TypeError(f"take_momentum knows the momentum of torch.optim.SGD, not of {type(optimizer).__name__}")
        found: set[float | None] = {group.get("momentum") for group in optimizer.param_groups}
        momentum = found.pop()
        if found or momentum is None:
            raise ValueError(
                f"take_momentum needs one momentum for all parameter groups, got {sorted(map(str, {momentum, *found}))}"
            )
        if any(group.get("nesterov") or group.get("dampening") for group in optimizer.param_groups):
            raise ValueError("take_momentum knows plain momentum only: nesterov and dampening must be off")
        if not momentum:
            raise ValueError("take_momentum: the optimizer has no momentum to take (was it taken before?)")
        self._check_complete(optimizer)
        if not self._engine.collectives.active:
            self.value, self._left = 0.0, momentum
            self._disable()
            return momentum
        self._enable(momentum)
        for group in optimizer.param_groups:
            group["momentum"] = 0.0
            group["weight_decay"] = group.get("weight_decay", 0.0) / (1.0 - momentum)
        return momentum

    @modes_off
    def give_back(self, optimizer: Optimizer) -> float:
        """See :meth:`hvd_compress.methods.sparse.SparseMethod.return_momentum`."""
        if self._left:
            momentum, self._left = self._left, 0.0
            return momentum
        momentum, self.value = self.value, 0.0
        if not momentum:
            raise ValueError("return_momentum: this compressor has no momentum to return")
        self._disable()
        for group in optimizer.param_groups:
            group["momentum"] = momentum
            group["weight_decay"] = group.get("weight_decay", 0.0) * (1.0 - momentum)
        return momentum

    def check(self, optimizer: Optimizer) -> None:
        """Raises ``ValueError`` if momentum would be lost or counted twice."""
        if self._left and any(group.get("momentum") != self._left for group in optimizer.param_groups):
            raise ValueError(
                f"take_momentum() left {self._left:g} to the optimizer, which has another momentum now: was the state "
                "of a job of several processes loaded? Set momentum and weight_decay as they were before it"
            )
        if not self.value:
            return
        method = self._engine.method
        if getattr(optimizer, "_compression", method) is not method:
            raise ValueError(
                "this compressor has the momentum, but DistributedOptimizer was not given it: pass compression="
            )
        if not self._engine.collectives.active:
            raise ValueError(
                "momentum would be lost: with one process, Horovod calls no compressor; give it to the optimizer, set "
                "momentum=0 here, and call compression.take_momentum(optimizer), which then leaves it there"
            )
        if self._engine.collectives.ordered or getattr(optimizer, "_compression", None) is method:
            self._check_complete(optimizer)
        for group in optimizer.param_groups:
            own = group.get("momentum") or (group.get("betas") or (0.0,))[0]
            if own:
                raise ValueError(
                    f"momentum would count twice: {self.value:g} in this compressor and {own:g} in "
                    f"{type(optimizer).__name__}; set the optimizer's to 0, or call "
                    "compression.take_momentum(optimizer) before training instead of momentum="
                )

    # Gradients that are not compressed.

    def dense_averaged(self, number: int, grad: Tensor) -> None:
        """Replaces the averaged gradient of parameter ``number`` by its velocity."""
        if self.value:
            self._dense.update(number, grad, self.value)

    def check_sparse(self, tensor: Tensor) -> None:
        """Raises ``ValueError`` for a sparse gradient, which bypasses the compressor."""
        if tensor.is_sparse and self.value:
            raise ValueError("sparse gradients would have no momentum: use sparse_as_dense=True, or no momentum here")

    def restart(self) -> None:
        """See :meth:`DenseVelocity.restart`."""
        self._dense.restart()

    def state(self) -> dict[str, Tree]:
        """The saved state beyond the buckets'."""
        momentum: Tree = Fixed(self.value, "take_momentum() comes before load_state_dict()")
        return {"momentum": momentum, **({"dense_velocity": self._dense.state()} if self.value else {})}

    def _enable(self, momentum: float) -> None:
        self.value = momentum
        for bucket in self._engine.buckets:
            if "velocity" not in bucket.state:
                bucket.add_state("velocity", per_rank=True)

    def _disable(self) -> None:
        self._dense.restart()
        for velocity in self.other_velocities:
            velocity.zero_()
        for bucket in self._engine.buckets:
            bucket.state.pop("velocity", None)

    def _check_complete(self, optimizer: Optimizer) -> None:
        if unknown := self._engine.unknown_parameters(optimizer):
            raise ValueError(
                f"{unknown} of the optimizer's parameters were not given to this compressor and would lose their "
                "momentum: give it all of the optimizer's named parameters"
            )
