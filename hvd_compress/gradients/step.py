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

import abc
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from ..engine.clock import Clock, Unapplied
from ..engine.dense import DenseGradient
from ..engine.engine import Engine
from ..engine.facts import OptimizerFacts
from ..engine.modes import modes_off
from ..engine.optimizers import parameters_of
from ..engine.place import Place, check_gradient
from ..engine.shards import local
from ..engine.work import any_unsent
from ..engine.work import undo as undo_works
from .last_average import IN_GRAD, LastAverage
from .same_weights import SameWeights


class GradScaler(Protocol):
    """A ``torch.amp.GradScaler``."""

    def get_scale(self) -> float: ...


class _State(Enum):
    IDLE = auto()
    COLLECTING = auto()
    AVERAGED = auto()
    TAKEN_BACK = auto()


_THROWN_AWAY = (
    "averages were zeroed before an optimizer has applied them, and the residuals keep a part of their gradients. Run "
    "backward passes whose gradients nobody applies, such as a generator's through its discriminator, in no_sync() of "
    "this model (FSDP2: after set_requires_gradient_sync(False)). Where a step is left out, call discard_step(), or "
    "give grad_scaler=, if a GradScaler skips it"
)

# Read for every gradient: looking up a member of an enumeration takes longer.
_COLLECTING = _State.COLLECTING


class GradientStep(Clock):
    """The steps of one compressor: the base of the hosts, which pass gradients in. Methods without a docstring: see
    :class:`~hvd_compress.engine.clock.Clock`.

    Args:
        grad_scaler: a ``torch.amp.GradScaler``, or None.
    """

    comes_first = True
    #: Whether the host averages uncompressed gradients itself, and whether each gradient has a version counter.
    _averages_dense, _versions = False, False
    #: Whether the host's hooks were removed, so that optimizers apply gradients that it has not passed in.
    _detached = False

    def __init__(self, engine: Engine, grad_scaler: GradScaler | None) -> None:
        self._engine, self._scaler = engine, grad_scaler
        self._state = _State.IDLE
        #: Whether the gradients may hold an average that was taken back.
        self._discarded = False
        #: Undoes the last exchange in place of the methods, if it is set.
        self._undo: Callable[[], None] | None = None
        self._last_average, self._weights = LastAverage(engine.parameters), SameWeights(engine)
        # True until the first gradient arrives, and until bypassed_by() has been true.
        self._may_be_bypassed = True
        #: Whether a backward pass for another optimizer has left a part of its gradients in the residuals.
        self._must_refuse = False
        #: Whether the step exchanges anything: one rank of torch without momentum has the average.
        self._exchanges = True
        #: Whether the gradient of each parameter has arrived since its optimizer has stepped.
        self._passed = bytearray(len(engine.parameters))

    # What hosts know.

    @property
    @abc.abstractmethod
    def active(self) -> bool:
        """Whether gradients pass through the compressor: one rank without others keeps its own."""

    @abc.abstractmethod
    def _given(self, optimizer: Optimizer) -> bool | None:
        """Whether the host's own kind of optimizer was given this compressor; None for a plain optimizer."""

    @abc.abstractmethod
    def _check_optimizer(self, optimizer: Optimizer) -> None:
        """Raises an error for an optimizer that averages gradients in a way that does not fit, and warns of one whose
        gradients the host has not passed in."""

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
        contains = self._last_average.arrives(number, before)
        if self._state is not _COLLECTING:
            self._begin()
        if contains:
            self._refuse_last_average(number)
        self._passed[number] = True
        return engine.arrive(number, grad) if self._exchanges else None

    def finish(self) -> None:
        """Runs the step's exchanges to their ends; every gradient of the step must have arrived on this rank. Waits."""
        if self._state is _COLLECTING:
            self._engine.finish()
            thrown_away, waited = self._last_average.thrown_away and not self._discarded, self._last_average.waited
            self._state, self._discarded = _State.AVERAGED, False
            self._last_average.written()
            try:
                self._weights.compare(self._passed)
                if thrown_away:
                    self._look_at_residuals(waited)
            except BaseException:
                self.discard()
                raise

    def _bypassed_by(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer step applies gradients although none has arrived in this process so far. True at most
        once. Synchronises a GPU until then, or until the first gradient arrives."""
        if not self._may_be_bypassed or not self._engine.optimizers.applies_gradients(optimizer):
            return False
        self._may_be_bypassed = False
        return True

    # What did not happen.

    def reset(self, wait: bool = False, overwritten: bool = False) -> None:
        """See :meth:`hvd_compress.Compressor.reset`. ``overwritten``: the memory of the step's gradients holds other
        values now. Nothing is waited for."""
        with self._engine.entered:
            self._must_refuse = False
            if self._state is _COLLECTING:
                self._state = _State.IDLE
            self._engine.reset(self._versions, overwritten)

    @modes_off
    def discard(self) -> None:
        """See :meth:`hvd_compress.Compressor.discard_step`."""
        with self._engine.entered:
            if self._state is _COLLECTING:
                raise RuntimeError(
                    "discard_step() in the middle of a step: with Horovod call optimizer.synchronize() first, after a "
                    "failure reset() instead"
                )
            if self._state is _State.AVERAGED:
                self._state, self._discarded = _State.TAKEN_BACK, True
                self.undo()

    def undo_if_skipped(self) -> float:
        """Takes the last average back if the ``GradScaler`` has lowered its scale and no optimizer has stepped. Returns
        the current loss scale. May synchronise a GPU."""
        scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
        if scale < self._engine.dense.scale and not self._last_average.stepped():
            self.discard()
        return scale

    def undo(self) -> None:
        """See :meth:`~hvd_compress.engine.clock.Unapplied.undo`."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()
        else:
            undo_works(self._engine.works)
            self._engine.method.undo()

    def undo_by(self, restore: Callable[[], None]) -> None:
        """See :meth:`~hvd_compress.engine.clock.Unapplied.undo_by`."""
        self._undo = restore

    def restart(self, same_ranks: bool) -> None:
        if not (same_ranks or self._state is _COLLECTING):
            self.undo_if_skipped()
        self.reset()
        self.clear()

    def clear(self) -> None:
        """Forgets the last average, and lets the ranks compare their configurations again."""
        self._state, self._undo, self._must_refuse = _State.IDLE, None, False
        self._last_average.clear()
        self._weights.clear()
        self._engine.comparison.changed()

    # What the engine calls, see Clock.

    @property
    def unapplied(self) -> Unapplied | None:
        return self if self.undoable and self._last_average.unapplied() else None

    @property
    def undoable(self) -> bool:
        """Whether the last average may still be taken back."""
        return self._state is _State.AVERAGED

    def options(self) -> dict[str, object]:
        return {"grad_scaler": self._scaler is not None}

    def begin_saving(self) -> None:
        if self._state is _COLLECTING or self._engine.exchanges.running:
            raise RuntimeError(
                "state_dict() in the middle of a step; call it after optimizer.step() (or reset(), after a failure)"
            )
        self.undo_if_skipped()

    @modes_off
    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        self._last_average.before_optimizer_step()
        if self._must_refuse:
            self._must_refuse = False
            raise RuntimeError(f"{type(self._engine.method).__name__}: {_THROWN_AWAY}")
        engine = self._engine
        if self._detached:
            return
        if not self.collecting and self._last_average.applied_to(optimizer):
            return  # gradients are no longer passed in
        active, given = self.active, self._given(optimizer)
        if active:
            self._check_optimizer(optimizer)
        ours, unknown = given is True or not self.single, engine.optimizers.unknown(optimizer)
        bypassing = partial(self._bypassing, optimizer)
        engine.method.check_optimizer(OptimizerFacts(optimizer, given, ours, active, unknown, bypassing))

    def after_optimizer_step(self, optimizer: Optimizer, counts: bool) -> None:
        if counts:
            self._last_average.after_optimizer_step(optimizer)

    @modes_off
    def before_other_step(self, optimizer: Optimizer) -> None:
        self._last_average.before_other_step()
        if self._given(optimizer):
            raise ValueError(
                "this optimizer holds none of its compressor's parameters; build the compressor from the named "
                "parameters of the model that is trained (not of one that was copied afterwards)"
            )

    def _begin(self) -> None:
        engine = self._engine
        # First: if the ranks differ, the last average may still be taken back.
        engine.compare()
        stepped = self._last_average.ids_stepped()
        for number, parameter in enumerate(engine.parameters if stepped else ()):
            if id(parameter) in stepped:
                self._passed[number] = False
        scale = self.undo_if_skipped()
        if self._state is _State.AVERAGED:
            self._state = _State.IDLE
        self._undo = None
        self._exchanges = self.active
        engine.begin(engine.works if self._exchanges else (), engine.step, scale, self._averages_dense)
        self._state, self._may_be_bypassed = _COLLECTING, False
        self._weights.begin()

    def _bypassing(self, optimizer: Optimizer) -> list[str]:
        """The names of parameters whose gradients the optimizer applies with the last average, though they have not
        passed through here, as of layers that DDP ignores. Synchronises a GPU if some have not."""
        if not self.undoable or all(self._passed):
            return []
        held, engine = parameters_of([optimizer]), self._engine
        pairs = zip(engine.names, engine.parameters, self._passed, strict=True)
        grads = [(name, p.grad) for name, p, passed in pairs if not passed and id(p) in held]
        return [name for name, g in grads if g is not None and not g.is_sparse and bool(local(g).any())]

    def _look_at_residuals(self, waited: bool) -> None:
        """Called when the average before this one was zeroed without a step: notices whether the residuals keep a part
        of its gradients. Only warns if it may have been a step that was left out, or one that is made of several
        averages: if no other optimizer has stepped while it ``waited``."""
        engine = self._engine
        if any_unsent(engine.works):
            self._must_refuse |= waited
            if not waited:
                engine.warn(_THROWN_AWAY)

    def _refuse_last_average(self, number: int) -> None:
        """Raises ``RuntimeError`` for a gradient that contains the last average, unless that does no harm."""
        method = self._engine.method
        if method.traits.linear and not self._discarded:
            return
        self.reset()
        raise RuntimeError(
            f"{self._engine.names[number]}: the gradient contains the last average, to which a second backward pass "
            f"has added: with {type(method).__name__} it would count twice. Run all but the last forward and backward "
            "pass of a step in no_sync() (FSDP2: after set_requires_gradient_sync(False)), or call backward() once on "
            "the sum of the losses; and zero all gradients after every average, also of parameters that the next pass "
            "does not use (Horovod: after synchronize(), step within skip_synchronize())"
        )
