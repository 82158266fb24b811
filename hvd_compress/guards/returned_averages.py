"""Averages that come back in gradients, because a backward pass adds to them.

People: run a second synchronised backward pass before a step, or do not zero gradients.
Cost: the average counts twice: DGC grew to 1.7e19, momentum became NaN. (Other methods train as usual, without errors.)
Noticed: hooks of 32 parameters see whether the average is still in `.grad` when a gradient is added to it.
Message: `the gradient contains the last average` …
Cure: all but the last backward pass of a step in `no_sync()` (FSDP2: after `set_requires_gradient_sync(False)`), and
    zero all gradients after every average, also of parameters that the next pass does not use
"""

import weakref
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook

from ..engine.engine import Engine
from ..engine.modes import modes_off
from ..engine.shards import local
from ..engine.spread import PROBES, spread
from .bypassing_gradients import Stepped

#: A mark: the average is in the parameter's ``.grad``.
IN_GRAD = torch.empty(0, dtype=torch.float32, device="cpu")


class ReturnedAverages:
    """Looks at the ``.grad`` of some parameters after an average was written there. Only a hook before the accumulation
    can see that a gradient is added to it."""

    def __init__(self, engine: Engine, stepped: Stepped) -> None:
        self._engine, self._parameters, self._steppers = engine, engine.parameters, stepped
        self._probes = spread([number for number, p in enumerate(self._parameters) if p.requires_grad], PROBES)
        self._hooked = False
        #: By parameter that is looked at and whose ``.grad`` may hold the last average: ``.grad`` when the average was
        #: written, ``.grad`` before a gradient was added, and ``.grad`` and its version before an optimizer stepped.
        self._written: dict[int, weakref.ref[Tensor] | None] = {}
        self._added: dict[int, weakref.ref[Tensor]] = {}
        self._applied: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        #: Whether a gradient has arrived where an average that no optimizer has applied was zeroed.
        self.zeroed = False

    def written(self) -> None:
        """Called when averages have been written to the gradients."""
        if not self._hooked:
            self._hook()
        self.clear()
        for number in self._probes:
            grad = self._parameters[number].grad
            self._written[number] = None if grad is None else weakref.ref(grad)

    def clear(self) -> None:
        """Called when there is no average any more."""
        self._written.clear()
        self._added.clear()
        self._applied.clear()
        self.zeroed = False

    def before_optimizer_step(self) -> None:
        """Called when an optimizer that holds some of the parameters is about to step."""
        for number in self._written:
            grad = self._parameters[number].grad
            if grad is not None:
                self._applied[number] = weakref.ref(grad), grad._version

    @property
    def there(self) -> bool:
        """Whether the averages are still the parameters' ``.grad``."""
        return all(ref is None or ref() is self._parameters[n].grad for n, ref in self._written.items())

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

    def arrives(self, number: int, before: Tensor | None) -> bool:
        """Whether the gradient of parameter ``number`` that a host passes in contains the last average. ``before``: the
        tensor that would contain it, if not :data:`IN_GRAD`."""
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
        return same and bool(self._steppers.ever) and self._remains(number, grad)

    def refuse(self, number: int) -> None:
        """Raises ``RuntimeError`` for a gradient that contains the last average."""
        raise RuntimeError(
            f"{self._engine.names[number]}: the gradient contains the last average, to which a second backward pass "
            f"has added: with {type(self._engine.method).__name__} it would count twice. Run all but the last forward "
            "and backward pass of a step in no_sync() (FSDP2: after set_requires_gradient_sync(False)), or call "
            "backward() once on the sum of the losses; and zero all gradients after every average, also of parameters "
            "that the next pass does not use (Horovod: after synchronize(), step within skip_synchronize())"
        )

    def _gone(self, number: int) -> None:
        """A gradient of parameter ``number`` arrives, and the average is no longer in ``.grad``."""
        written, parameter = self._written.pop(number), self._parameters[number]
        if written is not None and not self._steppers.now:
            self.zeroed |= id(parameter) in self._steppers.ever

    def _remains(self, number: int, grad: Tensor) -> bool:
        """Whether the average is still in the gradient. Synchronises a GPU, but not if an optimizer has stepped and the
        gradient was zeroed."""
        own = id(self._parameters[number])
        if own in self._steppers.now:
            applied, version = self._applied.get(number, (None, 0))
            if applied is None or applied() is not grad or grad._version != version:
                return False
        elif (ever := self._steppers.ever) and own not in ever:  # no optimizer applies its gradients
            return False
        return bool(local(grad).any())

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


@modes_off
def _before_accumulation(averages: "weakref.ref[ReturnedAverages]", number: int, grad: Tensor) -> None:
    if (alive := averages()) is not None:
        alive.before_accumulation(number)
