"""Observes what becomes of an average.

================================================  ======================================================
after an average                                  what follows
================================================  ======================================================
an optimizer steps                                it was applied: ``stepped()``
a ``GradScaler`` lets the optimizer skip          it was not: ``called``, but not ``stepped()``
nobody steps, ``.grad`` stays, no weight changes  it is ``unapplied()``: a state that is saved now is without it
nobody stepped after the average before, either   the user's own code applies averages: it is applied
================================================  ======================================================
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..engine.shards import local
from ..engine.spread import PROBES, spread


class LastAverage:
    """Looks at some ``parameters`` after an average was written to their ``.grad``, and at their optimizers' steps."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._probes = spread([number for number, p in enumerate(parameters) if p.requires_grad], PROBES)
        #: The versions of these parameters when the average was written; empty without an average.
        self._versions: list[int] = []
        # Whether no optimizer stepped after the average before this one: the user's own code applies averages.
        self._own_updates = False
        #: For each optimizer step since the average was written, the tensor that tells whether it was skipped, if any.
        self._steps: list[Tensor | None] = []

    def written(self) -> None:
        """Called when averages have been written to the gradients."""
        self._own_updates = bool(self._versions) and not self.called
        self._versions = [self._parameters[number]._version for number in self._probes]
        self._steps.clear()

    def clear(self) -> None:
        """Called when there is no average any more."""
        self._versions.clear()

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called when the optimizer has stepped, or skipped the step."""
        # A GradScaler lets a fused optimizer step in any case, and its kernel skips the step by this tensor.
        found_inf = getattr(optimizer, "found_inf", None)
        if self._versions:  # there is an average
            self._steps.append(None if found_inf is None else found_inf.detach().clone())

    @property
    def called(self) -> bool:
        """Whether an optimizer's step was called since the average was written, also if it was skipped."""
        return bool(self._steps)

    def stepped(self) -> bool:
        """Whether an optimizer has changed the parameters since the average was written. May synchronise a GPU."""
        return any(found_inf is None or not bool(found_inf) for found_inf in self._steps)

    @property
    def untouched(self) -> bool:
        """Whether no weight has changed since the average was written. False if no optimizer stepped after the average
        before, either."""
        return not self._own_updates and self._versions == [self._parameters[n]._version for n in self._probes]

    def unapplied(self) -> bool:
        """Whether nobody has applied the last average so far: no optimizer has stepped, it is :attr:`untouched`, and
        gradients are there still. False for an average that is not finite, which has sent nothing. Synchronises a
        GPU."""
        if not self.untouched or self.stepped():
            return False
        grads = [local(p.grad) for p in self._parameters if p.grad is not None and not p.grad.is_sparse]
        return any(bool(grad.any()) for grad in grads) and all(bool(grad.isfinite().all()) for grad in grads)
