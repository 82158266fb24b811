"""Finds the parameter of a gradient: Horovod passes ``p.grad`` to a compressor and nothing else."""

import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..engine.modes import modes_off

# The largest difference between two dense copies of one sparse gradient, relative to the largest entry.
_TOLERANCE = 0.01


class GradientLookup:
    """Finds a parameter's number from its gradient, usually in O(1).

    A post-accumulate hook runs before Horovod's own and records ``id(p.grad)``. A record is used only while ``p.grad``
    is that very tensor, so a reused ``id`` cannot name the wrong parameter. Gradients that Horovod made itself (zeros
    for an unused parameter) had no hook and are found by a scan.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._number_by_id: dict[int, int] = {}
        self._latest = -1
        self._copied: set[int] = set()
        #: Whether a gradient was accumulated since :meth:`clear`.
        self.accumulated = False
        # The hooks live as long as the model and must not keep the compressor alive.
        this = weakref.ref(self)
        hooks = [
            parameter.register_post_accumulate_grad_hook(partial(_record, this, number))  # type: ignore[no-untyped-call]
            for number, parameter in enumerate(parameters)
            if parameter.requires_grad
        ]
        weakref.finalize(self, lambda: [hook.remove() for hook in hooks])

    def record(self, number: int) -> None:
        """Called by the hook: the gradient of parameter ``number`` is complete."""
        if len(self._number_by_id) > 2 * len(self._parameters):
            self.clear()  # with one process no step ever begins or ends
        self.accumulated = True
        self._number_by_id[id(self._parameters[number].grad)] = number
        self._latest = number

    def is_parameter(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is a parameter itself, as Horovod's Adasum passes."""
        return any(tensor is parameter for parameter in self._parameters)

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

    def clear(self) -> None:
        """Drops the records of gradients that no longer exist. Called at the end of every step."""
        self._copied.clear()
        self.accumulated = False
        self._number_by_id = {
            id(parameter.grad): number
            for number, parameter in enumerate(self._parameters)
            if parameter.grad is not None
        }

    def _find_dense_copy(self, grad: Tensor) -> int | None:
        """Finds the parameter of a dense copy: with ``sparse_as_dense`` Horovod passes a dense copy of a sparse
        gradient, which only its values identify. Among equal candidates, one without a copy so far is preferred, then
        the one whose hook ran last."""
        candidates = [
            number
            for number, parameter in enumerate(self._parameters)
            if parameter.grad is not None and parameter.grad.is_sparse and _is_copy(grad, parameter.grad)
        ]
        if not candidates:
            return None
        number = min(candidates, key=lambda n: (n in self._copied, n != self._latest))
        self._copied.add(number)
        return number


def _is_copy(dense: Tensor, sparse: Tensor) -> bool:
    """Whether two gradients are equal to rounding: a GPU sums the rows of one index in any order."""
    if (sparse.shape, sparse.dtype, sparse.device) != (dense.shape, dense.dtype, dense.device):
        return False
    ours, theirs = (x.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) for x in (sparse.to_dense(), dense))
    distance = (ours - theirs).abs().max() / ours.abs().max().clamp(min=1e-30)
    return bool(distance <= _TOLERANCE)


@modes_off
def _record(lookup: "weakref.ref[GradientLookup]", number: int, parameter: Tensor) -> None:
    if (alive := lookup()) is not None:
        alive.record(number)
