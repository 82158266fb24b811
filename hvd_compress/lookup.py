"""Which parameter is this gradient? Horovod hands a compressor ``p.grad`` and nothing else."""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class GradientLookup:
    """Finds a parameter's number from its gradient, usually in O(1).

    A post-accumulate hook fires before Horovod's own and notes ``id(p.grad)``; the note counts only while ``p.grad`` is
    that very tensor, so a stale ``id`` can never name the wrong parameter. Gradients that Horovod made itself (an
    unused parameter's zeros) had no hook and are found by a scan.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._number_by_id: dict[int, int] = {}
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._last_fired: int | None = None
        # The hooks live as long as the model; they must not keep the compressor alive with it.
        me = weakref.ref(self)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(_note(me, number))  # type: ignore[no-untyped-call]
            for number, parameter in enumerate(parameters)
            if parameter.requires_grad
        ]

    def close(self) -> None:
        """Takes the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def noted(self, number: int) -> None:
        self._number_by_id[id(self._parameters[number].grad)] = number
        self._last_fired = number

    def is_parameter(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is a parameter itself, as Horovod's Adasum hands in."""
        return id(tensor) in self._numbers

    def find(self, grad: Tensor) -> int | None:
        """The number of the parameter whose gradient this is, or None."""
        number = self._number_by_id.get(id(grad))
        if number is not None and self._parameters[number].grad is grad:
            return number
        for number, parameter in enumerate(self._parameters):
            if parameter.grad is grad:
                self._number_by_id[id(grad)] = number
                return number
        # sparse_as_dense: a dense copy of the gradient that has just been accumulated.
        if self._last_fired is not None:
            last = self._parameters[self._last_fired]
            if last.grad is not None and last.grad.is_sparse and last.shape == grad.shape:
                return self._last_fired
        return None


def _note(lookup: "weakref.ref[GradientLookup]", number: int) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        alive = lookup()
        if alive is not None:
            alive.noted(number)

    return hook
