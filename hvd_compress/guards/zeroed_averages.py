"""Averages that are zeroed before anybody has applied them.

People: train a GAN, whose discriminator gets gradients in the generator's step, and zero them; leave out single steps.
Cost: compressors keep a part of these gradients, and send it with the next ones: the discriminator trains against
    itself.
Noticed: a gradient arrives where an average is gone, no optimizer has stepped, and residuals are not zero. If another
    optimizer has stepped meanwhile, an error before the next step; otherwise a warning.
Message: `averages were zeroed before an optimizer has applied them` …
Cure: backward passes whose gradients nobody applies in `no_sync()` of that model; `discard_step()` where a step is left
    out; `grad_scaler=` if a `GradScaler` skips it
"""

from collections.abc import Callable

from ..engine.engine import Engine
from ..engine.work import any_unsent

_THROWN_AWAY = (
    "averages were zeroed before an optimizer has applied them, and the residuals keep a part of their gradients. Run "
    "backward passes whose gradients nobody applies, such as a generator's through its discriminator, in no_sync() of "
    "this model (FSDP2: after set_requires_gradient_sync(False)). Where a step is left out, call discard_step(), or "
    "give grad_scaler=, if a GradScaler skips it"
)


class ZeroedAverages:
    """Decides about averages that were zeroed without a step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        #: Whether nobody had applied the average when another optimizer stepped, and whether that is looked at.
        self.waited, self._looks = False, True
        #: Whether a backward pass for another optimizer has left a part of its gradients in the residuals.
        self._must_refuse = False

    def before_other_step(self, called: bool, waits: Callable[[], bool]) -> None:
        """Called when an optimizer that holds none of the parameters is about to step. ``called``: whether one that
        holds some has stepped since the last average. ``waits()``: whether nobody has applied that."""
        if self._looks and not called:
            self.waited = waits()  # or it was zeroed, and a backward pass of others has followed

    def written(self, called: bool) -> None:
        """Called when there is a new average. ``called``: of the one before."""
        self._looks = self._looks and not (self.waited and called)
        self.waited = False

    def thrown_away(self, waited: bool) -> None:
        """Called when the average before the last one was zeroed without a step. ``waited``: whether another optimizer
        has stepped while the average was there. If none has, this only warns: the step may have been left out, or be
        made of several averages."""
        if any_unsent(self._engine.works):
            self._must_refuse |= waited
            if not waited:
                self._engine.warn(_THROWN_AWAY)

    def check(self) -> None:
        """Called before an optimizer's step. Raises ``RuntimeError``, once, after :meth:`thrown_away`."""
        if self._must_refuse:
            self._must_refuse = False
            raise RuntimeError(f"{type(self._engine.method).__name__}: {_THROWN_AWAY}")

    def forgive(self) -> None:
        """Called when the step is dropped."""
        self._must_refuse = False

    def clear(self) -> None:
        """Called when there is no average any more."""
        self._must_refuse = self.waited = False
