"""The base class of methods that send a few entries of the residual in each step."""

import abc
from collections.abc import Sequence
from numbers import Real
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..codecs import Codec, codec
from ..engine.arguments import NamedParameters, check_integer, check_number
from ..engine.bucket import Bucket, strides_of
from ..engine.facts import OptimizerFacts, Traits
from ..engine.method import Velocities
from ..engine.modes import modes_off
from ..engine.state import Fixed, Tree
from ..selection.schedule import Density, check_density, warm_up
from .base import Compressor
from .momentum import MomentumCorrection
from .sparse_work import Sending, SparseWork


class SparseMethod(Compressor):
    """A method that sends a few entries of the residual. Its arguments are those of all sparse methods:

    Args:
        density: slots as a share of the entries, in (0, 1], or a function of the step
            (:mod:`hvd_compress.schedule`).
        values: how values are encoded: the name of a codec or a codec (:mod:`hvd_compress.codecs`).
        budget_interval: steps between updates of the parameters' shares of a bucket's slots by importance (each within
            1/4 and 4 times the density); 0 keeps the shares equal.
        warmup_steps: steps over which the density decreases 1/4, 1/16, ... to ``density``.
        momentum: of momentum correction, in [0, 1). The optimizer's own momentum must then be 0; :meth:`take_momentum`
            moves it here. Uncompressed gradients get plain momentum, after they are averaged.

    Other arguments, and errors: see :class:`~hvd_compress.Compressor`.
    """

    #: The buckets that this rank owns.
    works: Sequence[SparseWork]
    #: Whether the state depends on the order in which parameters lie in memory.
    _ordered = False

    def __init__(
        self,
        named_parameters: NamedParameters,
        density: float | Density,
        *,
        values: str | Codec,
        budget_interval: int = 0,
        warmup_steps: int = 0,
        momentum: float = 0.0,
        **common: Any,
    ) -> None:
        warmup_steps = check_integer("warmup_steps", warmup_steps, 0)
        if isinstance(density, type) or not (callable(density) or isinstance(density, Real)):
            raise TypeError(f"density must be a number or a function of the step, got {density!r:.80}")
        if callable(density):
            if warmup_steps:
                raise ValueError("warmup_steps goes with a density that is a number, not with a function")
            # Ranks compare the function's name, and in each step the slots that it leads to.
            self._density, shown = density, getattr(density, "__qualname__", type(density).__name__)
        else:
            shown = check_density(density)
            self._density = warm_up(shown, warmup_steps)
        self._sending: dict[str, Any] = {
            "values": codec(values),
            "budget_interval": check_integer("budget_interval", budget_interval, 0),
        }
        self._shown: dict[str, object] = {"density": shown, "warmup_steps": warmup_steps}
        momentum = check_number("momentum", momentum, at_least=0, below=1)
        super().__init__(named_parameters, **common)
        self.works = [work for work in self.engine.works if isinstance(work, SparseWork)]
        self.momentum = MomentumCorrection(self.engine, self.works, momentum)

    def work(self, bucket: Bucket) -> SparseWork:
        return self.sparse_work(bucket, Sending(self._density, collectives=self.collectives, **self._sending))

    @abc.abstractmethod
    def sparse_work(self, bucket: Bucket, sending: Sending) -> SparseWork:
        """One bucket of this method."""

    def options(self) -> dict[str, object]:
        return {**self._shown, **self._sending, **super().options(), **self.momentum.options()}

    @property
    def traits(self) -> Traits:
        momentum = self.momentum.value
        sparse = any(work.density < 1.0 for work in self.works)
        return Traits(linear=not momentum, momentum=momentum, sparse=sparse, every_entry=False)

    def made_with(self) -> dict[str, Any]:
        """The options that a state depends on, by their names in an error."""
        strides = {p.piece.name: list(strides_of(p.piece.weight())) for p in self.engine.place_of if p is not None}
        return {
            "strides (use the same memory_format)": strides if self._ordered else None,
            "values": self._sending["values"].name,
        }

    def state(self) -> dict[str, Tree]:
        made_with: Tree = {what: Fixed(value) for what, value in self.made_with().items()}
        return {"made_with": made_with, **super().state(), **self.momentum.saved()}

    # Momentum.

    def restart(self) -> None:
        self.momentum.restart()

    @property
    def velocities(self) -> Velocities | None:
        return self.momentum if self.momentum.value else None

    def check_optimizer(self, facts: OptimizerFacts) -> None:
        self.momentum.check(facts)

    def dense_averaged(self, number: int, grad: Tensor) -> None:
        self.momentum.dense_averaged(number, grad)

    def undo(self) -> None:
        self.momentum.undo()

    def passed(self, tensor: Tensor) -> Tensor:
        if tensor.is_sparse and self.momentum.value:  # it bypasses the compressor
            raise ValueError("sparse gradients would have no momentum: use sparse_as_dense=True, or no momentum here")
        return super().passed(tensor)

    @modes_off
    def take_momentum(self, optimizer: Optimizer) -> float:
        """Moves the momentum of a ``torch.optim.SGD`` into this compressor, as momentum correction. Returns it.

        Call it before the first step, on every optimizer with momentum whose parameters this compressor has; their
        momenta must be equal. Run one synchronised backward pass per step. Weight decay stays in the optimizer, without
        momentum there, and is scaled by 1 / (1 - momentum) to keep its effect. To have the momentum back, build a new
        compressor and set both in the optimizer. A learning-rate schedule that changes the momentum (OneCycleLR) raises
        an error in the next step. With one process, or outside the process set, where gradients are not exchanged, the
        momentum stays in the optimizer; if a process set leaves ranks out, call ``hvd.broadcast_optimizer_state()``
        before: afterwards the states of the ranks differ.

        Raises:
            TypeError: another optimizer: its momentum is something else.
            ValueError: no momentum, different ones in different groups, Nesterov or dampening; a step has been taken;
                parameters that were not given to this compressor and would lose their momentum.
        """
        if self.takes_local_steps:
            raise ValueError("take_momentum: with LocalSteps, momentum stays in the optimizer")
        if self.step or self.clock.collecting:
            raise ValueError("take_momentum comes before the compressor's first step: build a new compressor for it")
        return self.momentum.take(optimizer, self.clock.alone)
