"""The guards of local steps, and the moments at which their clock calls them."""

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from ..engine.engine import Engine
from ..engine.optimizers import parameters_of
from .forgotten_steps import ForgottenSteps
from .loaded_weights import LoadedWeights
from .own_gradients import OwnGradients
from .replaced_parameters import Named, ReplacedParameters
from .replaced_weights import AFTER_CALL, AFTER_STEP, ReplacedWeights
from .unfit_optimizer import check_parameters, refuse_distributed


class LocalGuards:
    """Guards of one compressor's local steps. Methods are named after the moments.

    ``exchanging``: whether there is anything to exchange. ``begun``: whether a local step has followed since the common
    weights were taken. ``stepped``: whether an optimizer has stepped since the last call of ``LocalSteps.step()``.

    Args:
        named: names and parameters of the weights.
        model: of these, if it is known.
        watches: whether weights that were replaced would be mixed with others, and are an error.
    """

    def __init__(
        self,
        engine: Engine,
        named: Named,
        model: torch.nn.Module | None,
        optimizers: Sequence[Optimizer],
        watches: bool,
    ) -> None:
        self.watches, parameters, held = watches, [p for _, p in named], parameters_of(optimizers)
        self._engine, self._optimizers, self._ids = engine, optimizers, {id(p) for p in parameters}
        self._parameters = ReplacedParameters(named, model)
        self._weights = ReplacedWeights([p for p in parameters if id(p) in held], engine.warn)
        self.loaded, self.gradients = LoadedWeights(parameters), OwnGradients(engine, parameters)
        self._forgotten = ForgottenSteps(engine.warn)
        #: Whether all weights have become the common ones since the last call of ``LocalSteps.step()``.
        self._common = False

    def begin(self) -> None:
        """The parameters are about to become the common weights. Raises ``ValueError`` for those of another model."""
        self._parameters.check()

    def check(self) -> None:
        """An exchange begins. Raises ``ValueError`` if the optimizers or the model have other parameters now."""
        self._parameters.check()
        check_parameters(self._optimizers, self._ids)

    def before_optimizer_step(
        self, optimizer: Optimizer, exchanging: bool, begun: bool, stepped: bool, due: bool
    ) -> None:
        """An optimizer is about to step. ``due``: an exchange follows."""
        if exchanging:
            refuse_distributed(optimizer)
        if self.loaded.saved_with is not None and self._engine.optimizers.applies_gradients(optimizer):
            self.loaded.look()
        if exchanging and self.watches and begun and not stepped:
            self._weights.check(AFTER_CALL, routine=not self._common)
        steps = self._forgotten.stepping(optimizer)
        if exchanging and self._common:
            self.gradients.check_step(optimizer, steps)
        if exchanging and due:
            self.gradients.look()

    def changed(self) -> bool:
        """Whether something else than an optimizer's step has changed the weights. May synchronise a GPU."""
        return self._weights.changed() > 0.0

    def after_optimizer_step(self, optimizer: Optimizer, exchanging: bool, begun: bool) -> None:
        """An optimizer has stepped."""
        if exchanging and (self.watches or not begun):
            self._weights.note_step(optimizer)

    def call(self, exchanging: bool, stepped: bool) -> None:
        """``LocalSteps.step()`` is called."""
        if exchanging and self.watches and stepped:
            self._weights.check(AFTER_STEP)
        self._forgotten.called()
        self.loaded.forget()  # if no optimizer was seen, nobody knows the weights before the step
        self._common = False

    def before_average(self, stepped: bool) -> None:
        """All weights are about to be averaged."""
        if self.watches:
            self._weights.check(AFTER_STEP if stepped else AFTER_CALL, routine=False)

    def common(self) -> None:
        """All weights are the common ones."""
        self._common = True

    def note(self, exchanging: bool, begun: bool) -> None:
        """The weights are as they should be, after an exchange. Until the first step the clock asks :meth:`changed`."""
        if exchanging and (self.watches or not begun):
            self._weights.note()

    def restart(self) -> None:
        """Other ranks, or another state."""
        self._weights.clear()
        self.loaded.clear()
