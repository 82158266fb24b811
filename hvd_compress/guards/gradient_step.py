"""The guards of a training step, and the moments at which its clock calls them."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from ..engine.engine import Engine
from ..engine.facts import OptimizerFacts
from .averaging import was_given
from .bypassing_gradients import Arrivals, Stepped
from .optimizer import check_fixed_size, check_holds_some, check_optimizer
from .returned_averages import ReturnedAverages
from .same_weights import SameWeights
from .zeroed_averages import ZeroedAverages


class Host(Protocol):
    """The caller that passes gradients in, as the clock and its guards see it."""

    @property
    def single(self) -> bool:
        """Whether only one optimizer may step the parameters: the one from which the host passes gradients in."""

    @property
    def detached(self) -> bool:
        """Whether the host's hooks were removed, so that optimizers apply gradients that it has not passed in."""

    @property
    def active(self) -> bool:
        """Whether gradients pass through the compressor: one rank without others keeps its own."""

    def check_optimizer(self, optimizer: Optimizer, bypassed: Callable[[], bool]) -> None:
        """Raises an error for an optimizer that averages gradients in a way that does not fit, and warns of one whose
        gradients the host has not passed in: ``bypassed()``."""


class StepGuards:
    """Guards of one compressor whose gradients a host passes in. Methods are named after the moments."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._stepped = engine, Stepped()
        self._arrivals = Arrivals(engine, self._stepped)
        self._returned, self._zeroed = ReturnedAverages(engine, self._stepped), ZeroedAverages(engine)
        self._weights = SameWeights(engine)
        #: Whether there is an average, and whether the gradients may hold one that was taken back.
        self._averaged, self._discarded = False, False

    def before_arrival(self, number: int, before: Tensor | None) -> bool:
        """A gradient is passed in, which may begin a step. Returns whether it contains the last average."""
        return self._returned.arrives(number, before)

    def arrival(self, number: int, contains: bool) -> None:
        """The step has begun. Raises ``RuntimeError`` for a gradient that ``contains`` the last average, unless that
        does no harm."""
        if contains and (self._discarded or not self._engine.method.traits.linear):
            self._returned.refuse(number)
        self._arrivals.passed[number] = True

    def begin(self) -> None:
        """A step begins to exchange. Does not wait."""
        self._arrivals.begin()
        self._weights.begin()

    def averaged(self, untouched: bool) -> None:
        """Averages are written. ``untouched``: whether nobody has applied the last ones. Raises errors of the host."""
        thrown_away = self._returned.zeroed and untouched and not self._discarded
        waited, self._discarded = self._zeroed.waited, False
        self._zeroed.written(called=bool(self._stepped.now))
        self._returned.written()
        self._stepped.restart()
        self._averaged = True
        self._weights.compare(self._arrivals.passed)
        if thrown_away:
            self._zeroed.thrown_away(waited)

    def before_optimizer_step(self, optimizer: Optimizer, host: Host, collecting: bool, undoable: bool) -> None:
        """An optimizer of the parameters is about to step. ``collecting``: whether a step of gradients is in progress.
        ``undoable``: whether there is an average. Raises errors if it must not."""
        self._returned.before_optimizer_step()
        self._zeroed.check()
        if host.detached or (not collecting and self._averaged and self._arrivals.over(optimizer)):
            return  # gradients are not passed in, or no longer
        engine, active, given = self._engine, host.active, was_given(optimizer, self._engine.method)
        if active:
            host.check_optimizer(optimizer, partial(self._arrivals.bypassed_by, optimizer))
        ours, unknown = given is True or not host.single, engine.optimizers.unknown(optimizer)
        bypassing = partial(self._arrivals.bypassing, optimizer) if undoable else list
        facts = OptimizerFacts(optimizer, given, ours, active, unknown, bypassing)
        if engine.method.traits.fixed_size:
            check_fixed_size(facts)
        engine.method.check_optimizer(facts)
        check_optimizer(facts, engine.method.traits, engine.warn)

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """The optimizer has stepped, or skipped the step."""
        self._stepped.add(optimizer)

    def before_other_step(self, optimizer: Optimizer, unapplied: Callable[[], bool]) -> None:
        """An optimizer that holds none of the parameters is about to step. ``unapplied()``: whether nobody has applied
        the last average."""
        if self._averaged:
            called = bool(self._stepped.now)
            self._zeroed.before_other_step(called, lambda: self._returned.there and unapplied())
        check_holds_some(was_given(optimizer, self._engine.method))

    def discard(self) -> None:
        """The last average is taken back."""
        self._discarded = True

    def reset(self) -> None:
        """The step in progress is dropped."""
        self._zeroed.forgive()

    def clear(self) -> None:
        """There is no average any more, and no step in progress."""
        self._returned.clear()
        self._zeroed.clear()
        self._weights.clear()
        self._averaged = False
