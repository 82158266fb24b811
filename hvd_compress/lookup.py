"""Which parameter is this gradient? Horovod hands a compressor ``p.grad`` and nothing else."""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle


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
        # The hooks live as long as the model; they must not keep the compressor alive with it.
        me = weakref.ref(self)
        hooks = [
            parameter.register_post_accumulate_grad_hook(_note(me, number))  # type: ignore[no-untyped-call]
            for number, parameter in enumerate(parameters)
            if parameter.requires_grad
        ]
        weakref.finalize(self, _remove, hooks)

    def noted(self, number: int) -> None:
        self._number_by_id[id(self._parameters[number].grad)] = number

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
        return self._find_dense_copy(grad)

    def forget(self) -> None:
        """Drops the notes of gradients that are no more; to be called once a step."""
        self._number_by_id = {
            id(parameter.grad): number
            for number, parameter in enumerate(self._parameters)
            if parameter.grad is not None
        }

    def _find_dense_copy(self, grad: Tensor) -> int | None:
        """With ``sparse_as_dense`` Horovod hands in a dense copy of a sparse gradient: whose, only its values tell."""
        sparse = [
            number
            for number, parameter in enumerate(self._parameters)
            if parameter.grad is not None and parameter.grad.is_sparse and parameter.shape == grad.shape
        ]
        if len(sparse) > 1:
            sparse = [n for n in sparse if torch.equal(_dense(self._parameters[n]), grad)]
        return sparse[0] if sparse else None


def _dense(parameter: torch.nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.to_dense()


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _note(lookup: "weakref.ref[GradientLookup]", number: int) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        alive = lookup()
        if alive is not None:
            alive.noted(number)

    return hook
