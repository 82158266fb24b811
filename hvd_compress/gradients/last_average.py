"""Observes what becomes of an average: whether an optimizer applies it, and whether it comes back in a gradient.

================================================  ======================================================
after an average                                  what follows
================================================  ======================================================
an optimizer steps                                it was applied: ``stepped()``
a ``GradScaler`` lets the optimizer skip          it was not: ``called``, but not ``stepped()``
nobody steps, ``.grad`` stays, no weight changes  it is ``unapplied()``: a state that is saved now is without it
nobody stepped after the average before, either   the user's own code applies averages: it is applied
backward adds to ``.grad``                        the gradient ``arrives()`` with the average in it
``.grad`` is zeroed, or another tensor            it does not
the same, and nobody has stepped                  it was ``thrown_away``
================================================  ======================================================
"""

import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import unserializable_hook

from ..engine.optimizers import parameters_of
from ..engine.shards import local
from ..engine.spread import spread

# The most parameters that are looked at: a hook costs microseconds.
_PROBES = 32

#: A mark: the average is in the parameter's ``.grad``.
IN_GRAD = torch.empty(0, dtype=torch.float32, device="cpu")


class LastAverage:
    """Looks at some of the ``parameters`` and their ``.grad`` after an average was written there, and at the steps of
    their optimizers.

    A gradient that is accumulated on top of an average (a second backward pass without ``no_sync()`` and without zeroed
    gradients) contains it, and would be exchanged with it. Only a hook before the accumulation can see this.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._probes = spread([number for number, p in enumerate(parameters) if p.requires_grad], _PROBES)
        self._hooked = False
        #: By parameter that is looked at and whose ``.grad`` may hold the last average: ``.grad`` when the average was
        #: written, ``.grad`` before a gradient was added, and ``.grad`` and its version before an optimizer stepped.
        self._written: dict[int, weakref.ref[Tensor] | None] = {}
        self._added: dict[int, weakref.ref[Tensor]] = {}
        self._applied: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        #: The versions of these parameters when the average was written; empty without an average.
        self._versions: list[int] = []
        # Whether no optimizer stepped after the average before this one: the user's own code applies averages.
        self._own_updates = False
        #: For each optimizer step since the average was written, the tensor that tells whether it was skipped, if any.
        self._steps: list[Tensor | None] = []
        #: The optimizers that have stepped, ever, and the parameter lists of those that have stepped since the average,
        #: which may no longer exist; the ids of these parameters, None until needed.
        self._steppers, self._stepped = weakref.WeakSet[Optimizer](), dict[int, list[Tensor]]()
        self._trained: set[int] | None = None
        self._held: set[int] | None = None
        #: Whether a gradient has arrived where an average that no optimizer has applied was zeroed.
        self._zeroed = False
        #: Whether nobody had applied the average when another optimizer stepped, and whether that is looked at.
        self.waited, self._looks = False, True

    def written(self) -> None:
        """Called when averages have been written to the gradients."""
        if not self._hooked:
            self._hook()
        self._own_updates = bool(self._versions) and not self.called
        self._looks = self._looks and not (self.waited and self.called)
        self.clear()
        for number in self._probes:
            grad = self._parameters[number].grad
            self._written[number] = None if grad is None else weakref.ref(grad)
        self._versions = [self._parameters[number]._version for number in self._probes]
        self._steps.clear()
        self._stepped.clear()
        self._trained = self._held = None  # groups may be added

    def clear(self) -> None:
        """Called when there is no average any more."""
        self._written.clear()
        self._added.clear()
        self._applied.clear()
        self._versions.clear()
        self._zeroed = self.waited = False

    def before_optimizer_step(self) -> None:
        """Called when an optimizer that holds some of the parameters is about to step."""
        for number in self._written:
            grad = self._parameters[number].grad
            if grad is not None:
                self._applied[number] = weakref.ref(grad), grad._version

    def before_other_step(self) -> None:
        """Called when an optimizer that holds none of the parameters is about to step."""
        if self._looks and self._versions and not self.called:
            there = all(ref is None or ref() is self._parameters[n].grad for n, ref in self._written.items())
            self.waited = there and self.unapplied()  # or it was zeroed, and a backward pass of others has followed

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called when the optimizer has stepped, or skipped the step."""
        # A GradScaler lets a fused optimizer step in any case, and its kernel skips the step by this tensor.
        found_inf = getattr(optimizer, "found_inf", None)
        if self._versions:  # there is an average
            self._steps.append(None if found_inf is None else found_inf.detach().clone())
        self._steppers.add(optimizer)
        self._stepped.update((id(group["params"]), group["params"]) for group in optimizer.param_groups)
        self._trained = self._held = None

    def before_accumulation(self, number: int) -> None:
        """Called by autograd before it adds a gradient to parameter ``number``'s ``.grad``, or returns it
        (``autograd.grad``)."""
        if number not in self._written:
            return
        grad = self._parameters[number].grad
        if grad is not None and self._remains(number, grad):
            self._added[number] = weakref.ref(grad)
        else:
            self._gone(number)

    def arrives(self, number: int, before: Tensor | None = IN_GRAD) -> bool:
        """Whether the gradient of parameter ``number`` that a host passes in contains the last average. ``before``: the
        tensor that would contain it, if not the parameter's ``.grad``."""
        if number not in self._written:
            return False
        grad = self._parameters[number].grad if before is IN_GRAD else before
        if grad is None:
            self._gone(number)
            return False
        written, added = self._written.pop(number), self._added.get(number)
        if added is not None:
            return added() is grad and bool(local(grad).any())
        # Nothing was accumulated: this may be the average itself, or, without an optimizer, the user's own gradient.
        same = written is not None and written() is grad
        return same and bool(self._steppers) and self._remains(number, grad)

    @property
    def called(self) -> bool:
        """Whether an optimizer's step was called since the average was written, also if it was skipped."""
        return bool(self._steps)

    def stepped(self) -> bool:
        """Whether an optimizer has changed the parameters since the average was written. May synchronise a GPU."""
        return any(found_inf is None or not bool(found_inf) for found_inf in self._steps)

    @property
    def thrown_away(self) -> bool:
        """Whether the last average was zeroed before anybody has applied it."""
        return self._zeroed and not self._own_updates and self._weights_stay()

    def applied_to(self, optimizer: Optimizer) -> bool:
        """Whether the last average was applied, or skipped, to all parameters that this optimizer holds."""
        if not (self._versions and self._stepped):
            return False
        return parameters_of([optimizer]).intersection(map(id, self._parameters)) <= self.ids_stepped()

    def unapplied(self) -> bool:
        """Whether nobody has applied the last average so far: no optimizer has stepped, no weight has changed, and
        gradients are there still. False if no optimizer stepped after the average before, either, and for an average
        that is not finite, which has sent nothing. Synchronises a GPU."""
        if self._own_updates or self.stepped() or not self._weights_stay():
            return False
        grads = [local(p.grad) for p in self._parameters if p.grad is not None and not p.grad.is_sparse]
        return any(bool(grad.any()) for grad in grads) and all(bool(grad.isfinite().all()) for grad in grads)

    def _weights_stay(self) -> bool:
        return self._versions == [self._parameters[number]._version for number in self._probes]

    def ids_stepped(self) -> set[int]:
        """The ids of the parameters of the optimizers that have stepped since the average was written."""
        return {id(p) for parameters in self._stepped.values() for p in parameters}

    def _gone(self, number: int) -> None:
        """A gradient of parameter ``number`` arrives, and the average is no longer in ``.grad``."""
        written, parameter = self._written.pop(number), self._parameters[number]
        if written is not None and not self.called:
            self._zeroed |= id(parameter) in parameters_of(self._steppers)

    def _hook(self) -> None:
        self._hooked = True
        # The hooks live as long as the model and must not keep the compressor alive.
        this = weakref.ref(self)
        hooks = []
        for number in self._probes:
            if self._parameters[number].requires_grad:
                hook = unserializable_hook(partial(_before_accumulation, this, number))  # type: ignore[no-untyped-call]
                hooks.append(self._parameters[number].register_hook(hook))  # type: ignore[no-untyped-call]
        weakref.finalize(self, lambda: [hook.remove() for hook in hooks])

    def _remains(self, number: int, grad: Tensor) -> bool:
        """Whether the average is still in the gradient. Synchronises a GPU, but not if an optimizer has stepped and the
        gradient was zeroed."""
        parameter = self._parameters[number]
        if self._held is None:
            self._held, self._trained = self.ids_stepped(), parameters_of(self._steppers)
        if id(parameter) in self._held:
            applied, version = self._applied.get(number, (None, 0))
            if applied is None or applied() is not grad or grad._version != version:
                return False
        elif self._trained and id(parameter) not in self._trained:  # no optimizer applies its gradients
            return False
        return bool(local(grad).any())


def _before_accumulation(average: "weakref.ref[LastAverage]", number: int, grad: Tensor) -> None:
    if (alive := average()) is not None:
        alive.before_accumulation(number)
