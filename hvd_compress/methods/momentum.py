"""Momentum correction: the momentum of the user's optimizer, applied before compression (Lin et al., DGC, ICLR 2018).

The optimizer's own momentum would see an entry only when it is sent, late and all at once. With momentum correction
each gradient passes through a velocity first, u = momentum * u + g, the velocity is added to the residual, and entries
that are sent are cleared from u.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..engine.arguments import NamedParameters, check_number
from ..engine.dense import Averaging, as_real
from ..engine.dense_velocity import DenseVelocity
from ..engine.engine import Engine
from ..engine.facts import Facts, momentum_of
from ..engine.method import Velocities
from ..engine.modes import modes_off
from ..engine.nodes import owned
from ..engine.shards import local
from ..engine.state import Fixed, Tree
from ..gradients.guard import check_complete, check_momentum
from .base import Compressor
from .feedback import FeedbackWork


class MomentumCorrection:
    """The momentum of one compressor: a velocity beside each bucket's residual, and a plain one for each parameter that
    is not compressed. It is owed to those parameters whose optimizer it was taken from.

    Args:
        engine: of the compressor.
        works: its buckets, as far as this rank owns them.
        momentum: of all parameters, in [0, 1); 0 is off.
    """

    of_compressed = True

    def __init__(self, engine: Engine, works: Sequence[FeedbackWork], momentum: float) -> None:
        self._engine, self._works = engine, works
        self.value = 0.0
        # The momentum that take() left in the optimizer because this process does not exchange gradients.
        self._left = 0.0
        self._dense = DenseVelocity(engine)
        #: The parameters with momentum, and those of them of which no gradient has arrived yet: numbers by name.
        self._owed, self._awaited = dict[str, int](), dict[str, int]()
        # By optimizer, the number of its parameters and those that the engine knows.
        self._known = weakref.WeakKeyDictionary[Optimizer, tuple[int, dict[str, int]]]()
        if momentum:
            self._enable(momentum, {name: number for number, name in enumerate(engine.names)})

    @modes_off
    def take(self, optimizer: Optimizer) -> float:
        """See :meth:`MomentumMethod.take_momentum`."""
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
        if self.value not in (0.0, momentum):
            raise ValueError(
                f"take_momentum: this compressor has a momentum of {self.value:g} already, and the optimizer's is "
                f"{momentum:g}; take equal ones"
            )
        check_complete(self._engine.optimizers.unknown(optimizer))
        self._check_between_steps()
        if not self._engine.collectives.active:
            self.value, self._left = 0.0, momentum
            self._disable()
            return momentum
        held = self._held(optimizer)
        self._enable(momentum, held)
        for number in held.values():
            velocity = self._state(optimizer, number).pop("momentum_buffer", None)
            if velocity is not None:  # the same on all ranks: so is their mean
                self.set(number, local(velocity))
        for group in optimizer.param_groups:
            group["momentum"] = 0.0
            group["weight_decay"] = group.get("weight_decay", 0.0) / (1.0 - momentum)
        return momentum

    @modes_off
    def give_back(self, optimizer: Optimizer) -> float:
        """See :meth:`MomentumMethod.return_momentum`."""
        if self._left:
            momentum, self._left = self._left, 0.0
            return momentum
        momentum, held = self.value, {name: n for name, n in self._held(optimizer).items() if name in self._owed}
        if not held:
            raise ValueError("return_momentum: this compressor has no momentum to return")
        self._check_between_steps()
        for number, velocity in zip(held.values(), self._mean_velocities(held.values()), strict=True):
            parameter = self._engine.parameters[number]
            self._state(optimizer, number)["momentum_buffer"] = buffer = torch.empty_like(parameter)
            as_real(local(buffer)).copy_(velocity)
            self.set(number, torch.zeros_like(local(buffer)))
        for group in optimizer.param_groups:
            group["momentum"] = momentum
            group["weight_decay"] = group.get("weight_decay", 0.0) * (1.0 - momentum)
        for name in held:
            del self._owed[name]
            self._awaited.pop(name, None)
        if not self._owed:
            self.value = 0.0
            self._disable()
        else:
            self._tell()
        return momentum

    def check(self, facts: Facts) -> None:
        """Raises ``ValueError`` if momentum would be lost or counted twice."""
        groups = facts.optimizer.param_groups
        if self._left and any(group.get("momentum") != self._left for group in groups):
            raise ValueError(
                f"take_momentum() left {self._left:g} to the optimizer, which has another momentum now: was the state "
                "of a job of several processes loaded? Set momentum and weight_decay as they were before it"
            )
        if not self.value:
            return
        held = self._held(facts.optimizer)
        owing = not held.keys().isdisjoint(self._owed)
        check_momentum(facts, self.value, owing)
        if not owing:
            return
        for group in groups:
            own = momentum_of(group)
            if own and self._owes_any(group["params"]):
                raise ValueError(
                    f"momentum would count twice: {self.value:g} in this compressor and {own:g} in "
                    f"{type(facts.optimizer).__name__}; set the optimizer's to 0, or call "
                    "compression.take_momentum(optimizer) before training instead of momentum="
                )
        self._check_arrived(held, facts.arrived)

    def _owes_any(self, parameters: Iterable[Tensor]) -> bool:
        owed = {id(self._engine.parameters[number]) for number in self._owed.values()}
        return any(id(parameter) in owed for parameter in parameters)

    # Gradients that are not compressed.

    def dense_averaged(self, number: int, grad: Tensor) -> None:
        """Replaces the averaged gradient of parameter ``number`` by its velocity."""
        if self._engine.names[number] in self._owed:
            self._dense.update(number, grad, self.value)

    def check_sparse(self, tensor: Tensor) -> None:
        """Raises ``ValueError`` for a sparse gradient, which bypasses the compressor."""
        if tensor.is_sparse and self.value:
            raise ValueError("sparse gradients would have no momentum: use sparse_as_dense=True, or no momentum here")

    def restart(self) -> None:
        """See :meth:`DenseVelocity.restart`."""
        self._dense.restart()

    def options(self) -> dict[str, object]:
        """What must be the same on all ranks."""
        complete = len(self._owed) in (0, len(self._engine.names))
        some = {} if complete else {"parameters with momentum": " ".join(sorted(self._owed))}
        return {"momentum": self.value, **some}

    def state(self) -> dict[str, Tree]:
        """The saved state beyond the buckets'."""
        momentum: Tree = Fixed(self.value, "take_momentum() comes before load_state_dict()")
        return {"momentum": momentum, **({"dense_velocity": self._dense.state()} if self.value else {})}

    def _held(self, optimizer: Optimizer) -> dict[str, int]:
        """The numbers of the parameters that the optimizer holds, by name."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known, names = self._known.get(optimizer, (-1, {}))
        if known != count:
            names = self._find_held(optimizer)
            self._known[optimizer] = count, names
        return names

    def _find_held(self, optimizer: Optimizer) -> dict[str, int]:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        named = enumerate(zip(self._engine.names, self._engine.parameters, strict=True))
        return {name: number for number, (name, parameter) in named if id(parameter) in held}

    def _state(self, optimizer: Optimizer, number: int) -> dict[str, Any]:
        """The state of a parameter in the optimizer that steps: Horovod's shares parameter groups with the one that it
        wraps, but not the state."""
        state: dict[str, Any] = self._engine.optimizers.stepping(optimizer).state[self._engine.parameters[number]]
        return state

    def _check_between_steps(self) -> None:
        if self._engine.driver.unapplied is not None:
            raise ValueError(
                "the momentum must not move between an average and the step that applies it: call take_momentum() or "
                "return_momentum() after optimizer.step()"
            )

    def _enable(self, momentum: float, owed: dict[str, int]) -> None:
        self.value = momentum
        self._owed.update(owed)
        self._awaited.update(owed)
        self._tell()

    def _tell(self) -> None:
        """Tells the buckets of which pieces the momentum is."""
        for work in self._works:
            work.velocity.owe(self.value, set(self._owed))

    def _disable(self) -> None:
        self._owed.clear()
        self._awaited.clear()
        self._dense.restart()
        for work in self._works:
            work.end_momentum()

    def get(self, number: int) -> Tensor:
        """This rank's velocity of parameter ``number``. With nodes, one rank of a node has it, the others zeros."""
        place = self._engine.place_of[number]
        if place is None:
            return self._dense.get(number)
        if not isinstance(work := place.work, FeedbackWork):
            return work.held(place.piece)
        with work.bucket.order:
            return work.velocity_of(place.piece)

    def set(self, number: int, velocity: Tensor) -> None:
        """Replaces it."""
        place = self._engine.place_of[number]
        if place is None:
            self._dense.set(number, velocity)
        elif isinstance(work := place.work, FeedbackWork):
            with work.bucket.order:
                work.set_velocity(place.piece, velocity)

    def _mean_velocities(self, numbers: Iterable[int]) -> list[Tensor]:
        """Averages velocities over all ranks, by a collective: of a node, one has them."""
        engine, found = self._engine, list[Tensor]()
        for number in numbers:
            velocity = self.get(number)
            found.append(velocity if engine.place_of[number] is None else velocity * engine.nodes.ranks)
        with engine.entered:
            engine.peer.compare()
            engine.stats.begin_step()
            payloads = [velocity.flatten() for velocity in found]
            means = Averaging(engine.collectives, payloads, f"{engine.exchanges.label}.velocity").results()
            engine.stats.end_step()
        return [mean.view(velocity.shape) for mean, velocity in zip(means, found, strict=True)]

    def _check_arrived(self, held: Iterable[str], arrived: Sequence[int] | None) -> None:
        """Raises ``ValueError`` for a parameter whose gradients bypass the compressor."""
        engine = self._engine
        if not self._awaited or arrived is None:
            return
        self._awaited = {name: number for name, number in self._awaited.items() if not arrived[number]}
        for number in (self._awaited[name] for name in held if name in self._awaited):
            grad = engine.parameters[number].grad
            if grad is not None and bool(local(grad).any()):
                raise ValueError(
                    f"{engine.names[number]}: its gradient has not passed through this compressor (does "
                    "DistributedDataParallel ignore it?), and it would lose its momentum: give it to an optimizer of "
                    "its own, or do not take the momentum"
                )


class MomentumMethod(Compressor):
    """A method with momentum correction.

    Args:
        momentum: of momentum correction, in [0, 1); see :meth:`take_momentum`.
    """

    #: By bucket that this rank owns.
    works: Sequence[FeedbackWork]

    def __init__(self, named_parameters: NamedParameters, *, momentum: float, **common: Any) -> None:
        momentum = check_number("momentum", momentum, at_least=0, below=1)
        super().__init__(named_parameters, **common)
        self.works = cast(Any, owned(self.engine.works))  # of this method
        self.momentum = MomentumCorrection(self.engine, self.works, momentum)

    def options(self) -> dict[str, object]:
        return {**super().options(), **self.momentum.options()}

    def state(self) -> dict[str, Tree]:
        return {**super().state(), **self.momentum.state()}

    def restart(self) -> None:
        self.momentum.restart()

    @property
    def velocities(self) -> Velocities | None:
        return self.momentum if self.momentum.value else None

    def check_optimizer(self, facts: Facts) -> None:
        self.momentum.check(facts)
        super().check_optimizer(facts)

    def dense_averaged(self, number: int, grad: Tensor) -> None:
        self.momentum.dense_averaged(number, grad)

    def passed(self, tensor: Tensor) -> Tensor:
        self.momentum.check_sparse(tensor)
        return super().passed(tensor)

    def take_momentum(self, optimizer: Optimizer) -> float:
        """Moves the momentum of a ``torch.optim.SGD`` into this compressor, as momentum correction. Returns it.

        Call it on the optimizer that is given to Horovod or that steps the DDP model, with one synchronised backward
        pass per step. The parameters that this optimizer holds then have their momentum here, those of other optimizers
        do not: take it from every optimizer that has one, with equal momenta. Velocities that the optimizer has already
        are carried over. Weight decay stays in the optimizer, without momentum there, and is scaled by 1 / (1 -
        momentum) to keep its effect. :meth:`return_momentum` undoes this. A learning-rate schedule that changes the
        momentum (OneCycleLR) raises an error in the next step. With one process, or outside the process set, where
        Horovod calls no compressor, the momentum stays in the optimizer; if a process set leaves ranks out, call
        ``hvd.broadcast_optimizer_state()`` before: afterwards the states of the ranks differ.

        Raises:
            TypeError: another optimizer: its momentum is something else.
            ValueError: no momentum, different ones in different groups, Nesterov or dampening, or parameters that were
                not given to this compressor and would lose their momentum; in the optimizer's step, parameters whose
                gradients bypass this compressor.
        """
        if self.takes_local_steps:
            raise ValueError("take_momentum: with LocalSteps, momentum stays in the optimizer")
        return self.momentum.take(optimizer)

    def return_momentum(self, optimizer: Optimizer) -> float:
        """Moves the momentum and the velocities back to ``optimizer``, from which they were taken. Returns the
        momentum. All ranks must call it, after a step: velocities are averaged over them. Raises ``ValueError`` if
        there is none, or between an average and its step."""
        return self.momentum.give_back(optimizer)
