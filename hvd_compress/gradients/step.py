"""One training step: gradients arrive, averages are written, an optimizer applies them, or they are taken back.

::

    IDLE ──► COLLECTING ──► AVERAGED ──► applied by an optimizer, or by the user's own update
      ▲          │             │
      │  reset() │             │ discard(): the user's discard_step(), or a GradScaler has skipped the optimizer's step
      └──────────┘             ▼
                           TAKEN_BACK: what was sent is in the residuals again

All states but COLLECTING end when the next gradient arrives. That an average was applied is not a state: nobody tells,
:class:`~hvd_compress.gradients.last_average.LastAverage` observes it. The verbs for what did not happen:

``reset``
    drops the step in progress, which has failed: what has arrived and what was sent stay in the residuals.
``discard``
    takes back the last average, which nobody applies.
``undo``
    adds what an exchange has sent back to the residuals; of a step, of a bucket, and of each part of one.
``restart``
    forgets what belongs to the old ranks, or to the state before the one that is loaded.
``clear``
    empties a container; of a step, forgets the last average.
"""

from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from ..engine.clock import Clock
from ..engine.dense import DenseGradient
from ..engine.engine import Engine
from ..engine.modes import modes_off
from ..engine.place import Place, check_gradient
from ..engine.work import undo as undo_works
from ..guards import gradient_step as guards
from ..guards.returned_averages import IN_GRAD
from .last_average import LastAverage


class GradScaler(Protocol):
    """A ``torch.amp.GradScaler``."""

    def get_scale(self) -> float: ...


class _State(Enum):
    IDLE = auto()
    COLLECTING = auto()
    AVERAGED = auto()
    TAKEN_BACK = auto()


# Read for every gradient: looking up a member of an enumeration takes longer.
_COLLECTING = _State.COLLECTING


class GradientStep(Clock, guards.Host):
    """The steps of one compressor: the base of the hosts, which pass gradients in. Methods without a docstring: see
    :class:`~hvd_compress.engine.clock.Clock` and :class:`~hvd_compress.guards.gradient_step.Host`.

    Args:
        grad_scaler: a ``torch.amp.GradScaler``, or None.
    """

    comes_first = True
    #: Whether the host averages uncompressed gradients itself, and passes in ``p.grad``.
    _averages_dense = False
    detached = False

    def __init__(self, engine: Engine, grad_scaler: GradScaler | None) -> None:
        self._engine, self._scaler = engine, grad_scaler
        self._state = _State.IDLE
        #: Undoes the last exchange in place of the methods, if it is set.
        self._undo: Callable[[], None] | None = None
        self._last_average, self._guards = LastAverage(engine.parameters), guards.StepGuards(engine)
        #: Whether the step exchanges anything: one rank of torch without momentum has the average.
        self._exchanges = True

    # What hosts call.

    @property
    def collecting(self) -> bool:
        """Whether a step is in progress: after its first gradient, before :meth:`finish`."""
        return self._state is _COLLECTING

    def arrive(self, number: int, grad: Tensor, before: Tensor | None = IN_GRAD) -> Place | DenseGradient | None:
        """Takes the gradient of parameter ``number``, as :meth:`~hvd_compress.engine.engine.Engine.arrive`, whose
        errors it raises. Returns None if the gradient is the average. ``before``: the parameter's ``.grad``, if the
        gradient is kept elsewhere.

        Raises:
            RuntimeError: the gradient contains the last average.
        """
        engine = self._engine
        check_gradient(engine.names[number], grad, engine.place_of[number])
        engine.check_generation()
        contains = self._guards.before_arrival(number, before)
        if self._state is not _COLLECTING:
            self._begin()
        try:
            self._guards.arrival(number, contains)
        except RuntimeError:
            self.reset()
            raise
        return engine.arrive(number, grad) if self._exchanges else None

    def finish(self) -> None:
        """Runs the step's exchanges to their ends; every gradient of the step must have arrived on this rank. Waits."""
        if self._state is _COLLECTING:
            self._engine.finish()
            self._state, untouched = _State.AVERAGED, self._last_average.untouched
            self._last_average.written()
            try:
                self._guards.averaged(untouched)
            except BaseException:
                self.discard()
                raise

    # What did not happen.

    def reset(self, wait: bool = False, overwritten: bool = False) -> None:
        """See :meth:`hvd_compress.Compressor.reset`. ``overwritten``: the memory of the step's gradients holds other
        values now. Nothing is waited for."""
        with self._engine.entered:
            self._guards.reset()
            if self._state is _COLLECTING:
                self._state = _State.IDLE
            self._engine.reset(overwritten)

    @modes_off
    def discard(self) -> None:
        with self._engine.entered:
            if self._state is _COLLECTING:
                raise RuntimeError(
                    "discard_step() in the middle of a step: with Horovod call optimizer.synchronize() first, after a "
                    "failure reset() instead"
                )
            if self._state is _State.AVERAGED:
                self._state = _State.TAKEN_BACK
                self._guards.discard()
                self.undo()

    def undo_if_skipped(self) -> float:
        """Takes the last average back if the ``GradScaler`` has lowered its scale and no optimizer has stepped. Returns
        the current loss scale. May synchronise a GPU."""
        scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
        if scale < self._engine.dense.scale and not self._last_average.stepped():
            self.discard()
        return scale

    def undo(self) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()
        else:
            undo_works(self._engine.works)
            self._engine.method.undo()

    def undo_by(self, restore: Callable[[], None]) -> None:
        self._undo = restore

    def restart(self, same_ranks: bool) -> None:
        if not (same_ranks or self._state is _COLLECTING):
            self.undo_if_skipped()
        self.reset()
        self.clear()

    def clear(self) -> None:
        """Forgets the last average, and lets the ranks compare their configurations again."""
        self._state, self._undo = _State.IDLE, None
        self._last_average.clear()
        self._guards.clear()
        self._engine.comparison.changed()

    # What the engine calls, see Clock.

    @property
    def unapplied(self) -> bool:
        return self.undoable and self._last_average.unapplied()

    @property
    def undoable(self) -> bool:
        return self._state is _State.AVERAGED

    def options(self) -> dict[str, object]:
        return {"grad_scaler": self._scaler is not None}

    def begin_saving(self) -> None:
        if self._state is _COLLECTING or self._engine.exchanges.running:
            raise RuntimeError(
                "state_dict() in the middle of a step; call it after optimizer.step() (or reset(), after a failure)"
            )
        self.undo_if_skipped()

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        self._guards.before_optimizer_step(optimizer, self, self.collecting, self.undoable)

    def after_optimizer_step(self, optimizer: Optimizer, counts: bool) -> None:
        if counts:
            self._last_average.after_optimizer_step(optimizer)
            self._guards.after_optimizer_step(optimizer)

    def before_other_step(self, optimizer: Optimizer) -> None:
        self._guards.before_other_step(optimizer, self._last_average.unapplied)

    def _begin(self) -> None:
        engine = self._engine
        # First: if the ranks differ, the last average may still be taken back.
        engine.compare()
        scale = self.undo_if_skipped()
        if self._state is _State.AVERAGED:
            self._state = _State.IDLE
        self._undo = None
        self._exchanges = self.active
        engine.begin(engine.works if self._exchanges else (), engine.step, scale, by_host=self._averages_dense)
        self._state = _COLLECTING
        self._guards.begin()
