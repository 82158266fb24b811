"""Gradients that are allreduced without compression: small tensors, biases, norms."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .bucket import in_order_of, is_dense
from .collectives import Collectives, Handle, allreduce
from .shards import local


@dataclass(frozen=True)
class DenseGradient:
    """A gradient and its flat payload: contiguous, in a dtype that every host can sum.

    ``number``: of the parameter. ``grad``: the tensor to receive the average. ``strides``: of the payload's memory
    order. ``scale``: what the payload was divided by.
    """

    number: int
    grad: Tensor
    payload: Tensor
    strides: tuple[int, ...]
    scale: float

    def store(self, average: Tensor) -> None:
        """Writes the averaged payload, (numel,), to the gradient."""
        if average.data_ptr() != self.grad.data_ptr():
            self.grad.copy_(average.as_strided(self.grad.shape, self.strides))
            if self.scale != 1.0:
                self.grad.mul_(self.scale)


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs of real numbers, which every host can sum: a view, (..., 2). Others as they are."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def written_out(grad: Tensor) -> Tensor:
    """A gradient without shared entries, as ``expand()`` makes them: averages are written to it."""
    return grad.contiguous() if any(n > 1 and s == 0 for n, s in zip(grad.shape, grad.stride(), strict=True)) else grad


def dense_gradient(number: int, parameter: Tensor, grad: Tensor, half: bool, scale: float) -> DenseGradient:
    """Prepares a gradient for an uncompressed allreduce. ``half``: send float32 and bfloat16 as float16. ``scale``: the
    rank's loss scale, by which payloads are divided: scales may differ between ranks, and 65536 would leave float16 no
    range."""
    weight = as_real(local(parameter))
    ordered = in_order_of(weight, grad) if is_dense(weight) else grad.contiguous()
    if ordered.dtype == torch.float16:  # they have no bits to spare, and torch.amp.GradScaler refuses them
        scale = 1.0
    elif ordered.dtype == torch.bfloat16:  # Horovod cannot sum it
        ordered = ordered.float()
    if scale != 1.0:
        ordered = ordered / scale
    if half and ordered.dtype == torch.float32:
        ordered = ordered.half()
    return DenseGradient(number, grad, ordered.as_strided((ordered.numel(),), (1,)), ordered.stride(), scale)


class Averaging:
    """The averages over ranks of many flat tensors, by few allreduces, which are started at once.

    Args:
        tensors: the same shapes on all ranks, in the same order; not modified before :meth:`results`.
        label: of the collectives' names.
    """

    #: Entries of one allreduce, unless a single tensor has more.
    CAPACITY = 2**22

    def __init__(self, collectives: Collectives, tensors: Sequence[Tensor], label: str) -> None:
        self._sizes, self._ranks = [tensor.numel() for tensor in tensors], collectives.size
        groups = defaultdict[object, list[list[int]]](list)
        for number, tensor in enumerate(tensors):
            alike = groups[tensor.dtype, tensor.device]
            if not alike or sum(self._sizes[n] for n in alike[-1]) + tensor.numel() > self.CAPACITY:
                alike.append([])
            alike[-1].append(number)
        self._started: list[tuple[list[int], Handle]] = []
        for group in (group for alike in groups.values() for group in alike):
            payload = torch.cat([tensors[number] for number in group])
            handle = collectives.start(allreduce(payload, "dense_tensor"), f"{label}.{len(self._started)}")
            self._started.append((group, handle))

    def results(self) -> list[Tensor]:
        """Waits for the averages, in the order of the tensors."""
        results: dict[int, Tensor] = {}
        for group, handle in self._started:
            average = handle.result() / self._ranks
            results.update(zip(group, torch.split(average, [self._sizes[number] for number in group]), strict=True))
        return [results[number] for number in range(len(self._sizes))]
