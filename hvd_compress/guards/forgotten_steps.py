"""Calls of ``LocalSteps.step()`` that are forgotten, or one too many.

People: forget `local.step()`, call it after each of two optimizers, or train with other optimizers.
Cost: nothing is ever exchanged, or twice as often as the period says.
Noticed: optimizer steps and calls are counted. A warning.
Message: `optimizer steps without LocalSteps.step()`, `calls of LocalSteps.step() without a step of the optimizers`,
    `LocalSteps.step() was called after one optimizer and after another one` …
Cure: one call after each step of the optimizers that it was given, all of them together
"""

from collections import Counter
from collections.abc import Callable

from torch.optim import Optimizer

# After so many steps of an optimizer without LocalSteps.step(), and so many calls of that without a step of an
# optimizer, a warning says that something may have been forgotten.
_FORGOTTEN = 100


class ForgottenSteps:
    """Counts the steps of local steps' optimizers, and the calls that belong to them."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        # Since the last call of LocalSteps.step(), and of those that have stepped before it.
        self._steps, self._last = Counter[Optimizer](), frozenset[Optimizer]()
        self._calls = 0

    def stepping(self, optimizer: Optimizer) -> int:
        """Called before each step of one of them. Returns its steps since the last call of LocalSteps.step()."""
        self._steps[optimizer] += 1
        if self._steps[optimizer] == _FORGOTTEN:
            self._warn(f"{_FORGOTTEN} optimizer steps without LocalSteps.step(): call it after each one")
        return self._steps[optimizer]

    def called(self) -> None:
        """Called by LocalSteps.step(): the steps so far belong to it."""
        stepped = frozenset(self._steps)
        self._steps.clear()
        self._calls = 0 if stepped else self._calls + 1
        if self._calls == _FORGOTTEN:
            self._warn(
                f"{_FORGOTTEN} calls of LocalSteps.step() without a step of the optimizers that it was given: does "
                "another optimizer train the model, or has the model other parameters now?"
            )
        if stepped and self._last and stepped.isdisjoint(self._last):
            self._warn(
                "LocalSteps.step() was called after one optimizer and after another one, and counts each call: after "
                "several optimizers, call it once"
            )
        self._last = stepped or self._last
