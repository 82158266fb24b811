"""Gradients that have not passed through the compressor whose averages an optimizer applies.

People: forget `register_comm_hook()`, `register_fsdp_hooks()`, `average_gradients()` or Horovod's `compression=`, also
    after a resume.
Cost: every step is a dense one, or each rank trains by its own gradients.
Noticed: an optimizer applies gradients, and none has arrived.
Message: `this compressor has received no gradient`, `not given this compressor, which has received no gradient` …
Cure: the call that the message names

People: unfreeze layers after the model was wrapped, or let DDP ignore parameters.
Cost: with momentum in the compressor they train without it; with DeMo, by raw gradients at a sign's learning rate.
Noticed: their gradients are not zero in a step, and have not arrived.
Message: `its gradient has not passed through this compressor` …
Cure: wrap the model again after layers are unfrozen; an optimizer of their own for ignored parameters
"""

import weakref

from torch.optim import Optimizer

from ..engine.engine import Engine
from ..engine.optimizers import parameters_of
from ..engine.shards import local


class Stepped:
    """The parameters of optimizers that have stepped, by id: ``now``, since the last average."""

    def __init__(self) -> None:
        self.now, self._optimizers = set[int](), weakref.WeakSet[Optimizer]()

    def add(self, optimizer: Optimizer) -> None:
        """Called when an optimizer has stepped."""
        self._optimizers.add(optimizer)
        self.now |= parameters_of([optimizer])

    def restart(self) -> None:
        """Called when there is a new average."""
        self.now.clear()

    @property
    def ever(self) -> set[int]:
        """The parameters of optimizers that have ever stepped, and exist."""
        return parameters_of(self._optimizers)


class Arrivals:
    """Knows which gradients have passed through a compressor."""

    def __init__(self, engine: Engine, stepped: Stepped) -> None:
        self._engine, self._stepped = engine, stepped
        #: Whether the gradient of each parameter has arrived since its optimizer has stepped.
        self.passed = bytearray(len(engine.parameters))
        # True until the first gradient arrives, and until bypassed_by() has been true.
        self._may_be_bypassed = True

    def begin(self) -> None:
        """Called when a step begins."""
        self._may_be_bypassed = False
        for number, parameter in enumerate(self._engine.parameters):
            if id(parameter) in self._stepped.now:
                self.passed[number] = False

    def bypassed_by(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer step applies gradients although none has arrived in this process so far. True at most
        once. Synchronises a GPU until then, or until the first gradient arrives."""
        if not self._may_be_bypassed or not self._engine.optimizers.applies_gradients(optimizer):
            return False
        self._may_be_bypassed = False
        return True

    def over(self, optimizer: Optimizer) -> bool:
        """Whether all parameters of this optimizer have been stepped, or skipped, since the last average: another step
        then applies gradients that were not passed in. Ask only while there is an average."""
        held = parameters_of([optimizer]).intersection(map(id, self._engine.parameters))
        return bool(self._stepped.now) and held <= self._stepped.now

    def bypassing(self, optimizer: Optimizer) -> list[str]:
        """The names of parameters whose gradients the optimizer applies with the last average, though they have not
        passed through here, as of layers that DDP ignores. Synchronises a GPU if some have not."""
        if all(self.passed):
            return []
        held, engine = parameters_of([optimizer]), self._engine
        pairs = zip(engine.names, engine.parameters, self.passed, strict=True)
        grads = [(name, p.grad) for name, p, passed in pairs if not passed and id(p) in held]
        return [name for name, g in grads if g is not None and not g.is_sparse and bool(local(g).any())]
