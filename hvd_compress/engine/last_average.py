"""What becomes of an average after a step: an optimizer applies it, and it does not come back as a gradient."""

import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook

from .optimizer_watch import OptimizerWatch

# So many parameters are looked at, evenly spread: a hook costs microseconds.
_PROBES = 32


class LastAverage:
    """Looks at some of the ``parameters`` and their ``.grad`` after an average was written there.

    A gradient that is accumulated on top of an average (a second backward pass without ``no_sync()`` and without zeroed
    gradients) contains it, and would be exchanged with it. Only a hook before the accumulation can see this.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.nn.Parameter], watch: OptimizerWatch) -> None:
        self._names, self._parameters, self._watch = names, parameters, watch
        trained = [number for number, parameter in enumerate(parameters) if parameter.requires_grad]
        self._probes = trained[:: -(-len(trained) // _PROBES) or 1]
        #: By probe, ``.grad`` after the last average, until something is accumulated there.
        self._untouched: dict[int, weakref.ref[Tensor] | None] = {}
        self._versions: list[int] = []
        # Whether the average before was followed by no optimizer's step: the user's own code applies averages.
        self._own_updates = False
        #: The name of a parameter whose gradient contains the last average.
        self.reentered: str | None = None
        # The hooks live as long as the model and must not keep the compressor alive.
        this = weakref.ref(self)
        hooks = []
        for number in self._probes:
            hook = unserializable_hook(partial(_before_accumulation, this, number))  # type: ignore[no-untyped-call]
            hooks.append(parameters[number].register_hook(hook))  # type: ignore[no-untyped-call]
        weakref.finalize(self, lambda: [hook.remove() for hook in hooks])

    def written(self) -> None:
        """Averages have been written to the gradients. To be called before the watch forgets the step."""
        self._own_updates = bool(self._versions) and not self._watch.called
        self.forget()
        for number in self._probes:
            grad = self._parameters[number].grad
            self._untouched[number] = None if grad is None else weakref.ref(grad)
        self._versions = [self._parameters[number]._version for number in self._probes]

    def forget(self) -> None:
        """There is no average any more."""
        self._untouched.clear()
        self._versions.clear()
        self.reentered = None

    def before_accumulation(self, number: int) -> None:
        """The first gradient since the average is about to be added to parameter ``number``'s."""
        if self._untouched.pop(number, self) is not self:
            self._find(number)

    def arrives(self, number: int) -> None:
        """The gradient of parameter ``number`` is passed in. If nothing was accumulated, it may be the average."""
        if number in self._untouched:
            written = self._untouched.pop(number)
            if written is not None and written() is self._parameters[number].grad:
                self._find(number)

    def _find(self, number: int) -> None:
        parameter = self._parameters[number]
        if parameter.grad is None or self._watch.stepped_by(parameter):
            return
        if bool(parameter.grad.any()):
            self.reentered = self._names[number]

    def waits(self) -> bool:
        """Whether nobody has applied it so far: no optimizer has stepped, as it did after the average before, no probe
        has changed, and gradients are there still. (An average that is not finite has sent nothing.) Synchronises a
        GPU."""
        if (
            self._own_updates
            or self._watch.stepped()
            or self._versions != [self._parameters[n]._version for n in self._probes]
        ):
            return False
        grads = [p.grad for p in self._parameters if p.grad is not None and not p.grad.is_sparse]
        return any(bool(grad.any()) for grad in grads) and all(bool(grad.isfinite().all()) for grad in grads)


def _before_accumulation(average: "weakref.ref[LastAverage]", number: int, grad: Tensor) -> None:
    if (alive := average()) is not None:
        alive.before_accumulation(number)
