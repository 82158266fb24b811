"""Momentum correction: the momentum of the user's optimizer, taken over by the compressor (Lin et al., DGC, 2018).

An entry that waits for its turn would otherwise reach the optimizer's momentum late and all at once. Here it passes
through the momentum first: u = momentum * u + g enters the residual, and what is sent is cleared from u.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from .bucket import Bucket
from ..methods.base import Compressor


class MomentumCorrected(Compressor):
    """A compressor with a ``velocity`` beside each residual while momentum is on, and the plain velocities of the
    parameters that travel dense (in these, the finite part of a step that a ``GradScaler`` skips remains)."""

    def __init__(self, *args: Any, momentum: float = 0.0, **common: Any) -> None:
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum must lie in [0, 1), got {momentum}")
        super().__init__(*args, **common)
        self._momentum = 0.0
        #: What take_momentum() left in the optimizer.
        self._left = 0.0
        self._dense_velocity: dict[str, Tensor] = {}
        if momentum:
            self._set_momentum(momentum)

    def take_momentum(self, optimizer: Optimizer) -> float:
        """Takes the momentum over from a ``torch.optim.SGD``: it becomes momentum correction here and 0 there.

        Call it before the first step, on the optimizer that is given to Horovod; returns the momentum taken.
        Parameters that travel dense keep theirs, here. Weight decay, which stays in the optimizer and loses its
        momentum there, is scaled by 1 / (1 - momentum), so that it pulls as before. :meth:`return_momentum` undoes it
        all. A learning-rate schedule that cycles the momentum would bring it back: an error then. In a process alone,
        or outside the process set, where Horovod calls no compressor, the momentum stays where it is; where a process
        set leaves ranks out, call ``hvd.broadcast_optimizer_state()`` before: it would wait for what only some have.

        Raises:
            TypeError: another optimizer: its momentum would be another thing.
            ValueError: it has no momentum, its groups disagree, it uses Nesterov's or dampening, or it holds parameters
                that were not given to this compressor, which would have no momentum anywhere.
        """
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
        if strangers := self._strangers(optimizer):
            self._refuse(strangers)
        if not self._collectives.active:
            self._momentum, self._left = 0.0, momentum
            self.drop_velocity()
            return momentum
        self._set_momentum(momentum)
        for group in optimizer.param_groups:
            group["momentum"] = 0.0
            group["weight_decay"] = group.get("weight_decay", 0.0) / (1.0 - momentum)
        return momentum

    def return_momentum(self, optimizer: Optimizer) -> float:
        """Gives the momentum back to ``optimizer`` and ends the correction; returns the momentum.

        Raises ``ValueError`` if there is none to give.
        """
        if self._left:
            momentum, self._left = self._left, 0.0
            return momentum
        momentum, self._momentum = self._momentum, 0.0
        if not momentum:
            raise ValueError("return_momentum: this compressor has no momentum to return")
        self.drop_velocity()
        for group in optimizer.param_groups:
            group["momentum"] = momentum
            group["weight_decay"] = group.get("weight_decay", 0.0) * (1.0 - momentum)
        return momentum

    def _set_momentum(self, momentum: float) -> None:
        self._momentum = momentum
        for bucket in self._buckets:
            if "velocity" not in bucket.state:
                bucket.add_state("velocity")

    def drop_velocity(self) -> None:
        """The correction ends."""
        self._dense_velocity.clear()
        for bucket in self._buckets:
            bucket.state.pop("velocity", None)

    def momentum_text(self) -> str:
        """For ``__repr__``."""
        return f", momentum correction {self._momentum:g}" if self._momentum else ""

    def check_optimizer(self, optimizer: Optimizer) -> None:
        super().check_optimizer(optimizer)
        if self._left and any(group.get("momentum") != self._left for group in optimizer.param_groups):
            raise ValueError(
                f"take_momentum() left {self._left:g} to the optimizer, which has another momentum now: was the state "
                "of a job of several processes loaded? Set momentum and weight_decay as they were before it"
            )
        if not self._momentum:
            return
        if getattr(optimizer, "_compression", self) is not self:
            raise ValueError(
                "this compressor has the momentum, but DistributedOptimizer was not given it: pass compression="
            )
        if not self._collectives.active:
            raise ValueError(
                "momentum would be lost: in a process alone Horovod calls no compressor; give it to the optimizer, set "
                "momentum=0 here, and call compression.take_momentum(optimizer), which then leaves it there"
            )
        for group in optimizer.param_groups:
            own = group.get("momentum") or (group.get("betas") or (0.0,))[0]
            if own:
                raise ValueError(
                    f"momentum would count twice: {self._momentum:g} in this compressor and {own:g} in "
                    f"{type(optimizer).__name__}; set the optimizer's to 0, or call "
                    "compression.take_momentum(optimizer) before training instead of momentum="
                )

    def _meet(self, strangers: int) -> None:
        if self._momentum:
            self._refuse(strangers)
        super()._meet(strangers)

    def _refuse(self, strangers: int) -> NoReturn:
        raise ValueError(
            f"{strangers} of the optimizer's parameters were not given to this compressor and would lose their "
            "momentum: give it all of the optimizer's named parameters"
        )

    def _passed(self, tensor: Tensor) -> Tensor:
        if tensor.is_sparse and self._momentum:
            raise ValueError("sparse gradients would have no momentum: use sparse_as_dense=True, or no momentum here")
        return super()._passed(tensor)

    def settle(self, number: int, grad: Tensor) -> None:
        if not self._momentum:
            return
        name = self._names[number]
        velocity = self._dense_velocity.get(name)
        if velocity is None:
            wide = torch.promote_types(grad.dtype, torch.float32)
            velocity = self._dense_velocity[name] = torch.zeros_like(grad, dtype=wide)
        if self._scaler is None:
            grad.copy_(velocity.mul_(self._momentum).add_(grad))
            return
        # A step with an infinity will be skipped: it must not stay in the velocity.
        new = velocity * self._momentum + grad.to(velocity.dtype) / self._scale
        finite = new.isfinite()
        velocity.copy_(torch.where(finite, new, velocity))
        grad.copy_(torch.where(finite, new * self._scale, grad.to(velocity.dtype)))

    def restart(self, bucket: Bucket) -> None:
        # A new rank has none, and replicas would drift apart.
        self._dense_velocity.clear()
        super().restart(bucket)

    def method_state(self) -> dict[str, Any]:
        velocity = {name: tensor.clone() for name, tensor in self._dense_velocity.items()}
        return {**super().method_state(), "momentum": self._momentum, "dense_velocity": velocity}

    def load_method_state(self, state: dict[str, Any]) -> None:
        if state["momentum"] != self._momentum:
            raise ValueError(
                f"the state was made with momentum {state['momentum']}, this compressor has {self._momentum}"
            )
        super().load_method_state(state)
        parameters = dict(zip(self._names, self._parameters, strict=True))
        self._dense_velocity = {
            name: tensor.to(parameters[name].device, copy=True) for name, tensor in state["dense_velocity"].items()
        }
