"""What becomes of an average after a step: an optimizer applies it, and it does not come back as a gradient."""

import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook

from .optimizer_watch import OptimizerWatch
from .shards import local

# So many parameters are looked at, evenly spread: a hook costs microseconds.
_PROBES = 32


class LastAverage:
    """Looks at some of the ``parameters`` and their ``.grad`` after an average was written there.

    A gradient that is accumulated on top of an average (a second backward pass without ``no_sync()`` and without zeroed
    gradients) contains it, and would be exchanged with it. Only a hook before the accumulation can see this.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], watch: OptimizerWatch) -> None:
        self._parameters, self._watch = parameters, watch
        self._probes = spread([number for number, p in enumerate(parameters) if p.requires_grad], _PROBES)
        #: By probe whose ``.grad`` may hold the last average, that tensor when the average was written.
        self._written: dict[int, weakref.ref[Tensor] | None] = {}
        #: Of those of them to which a gradient was added, ``.grad`` before; ``.grad`` and its version when an optimizer
        #: stepped.
        self._added: dict[int, weakref.ref[Tensor]] = {}
        self._applied: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._versions: list[int] = []
        # Whether the average before was followed by no optimizer's step: the user's own code applies averages.
        self._own_updates = False
        # The hooks live as long as the model and must not keep the compressor alive.
        this = weakref.ref(self)
        hooks = []
        for number in self._probes:
            hook = unserializable_hook(partial(_before_accumulation, this, number))  # type: ignore[no-untyped-call]
            hooks.append(parameters[number].register_hook(hook))  # type: ignore[no-untyped-call]
        weakref.finalize(self, lambda: [hook.remove() for hook in hooks])

    def written(self) -> None:
        """Called when averages have been written to the gradients, before the watch forgets the step."""
        self._own_updates = bool(self._versions) and not self._watch.called
        self.forget()
        for number in self._probes:
            grad = self._parameters[number].grad
            self._written[number] = None if grad is None else weakref.ref(grad)
        self._versions = [self._parameters[number]._version for number in self._probes]

    def forget(self) -> None:
        """Called when there is no average any more."""
        self._written.clear()
        self._added.clear()
        self._applied.clear()
        self._versions.clear()

    def before_optimizer_step(self) -> None:
        """Called when an optimizer that holds some of the parameters is about to step."""
        for number in self._written:
            grad = self._parameters[number].grad
            if grad is not None:
                self._applied[number] = weakref.ref(grad), grad._version

    def before_accumulation(self, number: int) -> None:
        """Called when a gradient is about to be added to parameter ``number``'s, or only to be returned
        (``autograd.grad``)."""
        if number not in self._written:
            return
        grad = self._parameters[number].grad
        if grad is not None and self._remains(number, grad):
            self._added[number] = weakref.ref(grad)
        else:
            del self._written[number]

    def arrives(self, number: int) -> bool:
        """Whether the gradient of parameter ``number``, which is passed in, contains the last average."""
        if number not in self._written:
            return False
        written, added, grad = self._written.pop(number), self._added.get(number), self._parameters[number].grad
        if grad is None:
            return False
        if added is not None:
            return added() is grad and bool(local(grad).any())
        # Nothing was accumulated: it may be the average itself, or, without an optimizer, a gradient of the user's own.
        same = written is not None and written() is grad
        return same and self._watch.used and self._remains(number, grad)

    def _remains(self, number: int, grad: Tensor) -> bool:
        """Whether the average is still in the gradient. Synchronises a GPU, but not if an optimizer has stepped and the
        gradient was zeroed."""
        parameter = self._parameters[number]
        if self._watch.stepped_by(parameter):
            applied, version = self._applied.get(number, (None, 0))
            if applied is None or applied() is not grad or grad._version != version:
                return False
        elif self._watch.left_out(parameter):
            return False
        return bool(local(grad).any())

    def waits(self) -> bool:
        """Whether nobody has applied the last average so far: no optimizer has stepped, as it did after the average
        before, no probe has changed, and gradients are there still. (An average that is not finite has sent nothing.)
        Synchronises a GPU."""
        if (
            self._own_updates
            or self._watch.stepped()
            or self._versions != [self._parameters[n]._version for n in self._probes]
        ):
            return False
        grads = [local(p.grad) for p in self._parameters if p.grad is not None and not p.grad.is_sparse]
        return any(bool(grad.any()) for grad in grads) and all(bool(grad.isfinite().all()) for grad in grads)


def _before_accumulation(average: "weakref.ref[LastAverage]", number: int, grad: Tensor) -> None:
    if (alive := average()) is not None:
        alive.before_accumulation(number)


def spread(numbers: Sequence[int], count: int) -> Sequence[int]:
    """At most so many of the numbers, at irregular distances: what is done to every second parameter, or to a tenth of
    the model, is done to one of these."""
    if len(numbers) <= count:
        return numbers
    return sorted({numbers[int(i * 0.6180339887 % 1 * len(numbers))] for i in range(count)})
