"""Gradients that are averaged without compression: small tensors, biases, norms."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .bucket import in_order_of, is_dense
from .collectives import Collectives, Handle, allreduce
from .method import Method
from .profiling import stage
from .shards import local


@dataclass(frozen=True)
class DenseGradient:
    """A gradient and its flat payload: contiguous, in a dtype that every host can sum.

    ``number``: of the parameter, None for another tensor. ``grad``: the tensor to receive the average. ``strides``: of
    the payload's memory order. ``scale``: what the payload was divided by.
    """

    number: int | None
    grad: Tensor
    payload: Tensor
    strides: tuple[int, ...]
    scale: float

    def store(self, average: Tensor, method: Method | None) -> None:
        """Writes the averaged payload, (numel,), to the gradient, which the method may modify."""
        with stage("dense"):
            if average.data_ptr() != self.grad.data_ptr():
                self.grad.copy_(average.as_strided(self.grad.shape, self.strides))
                if self.scale != 1.0:
                    self.grad.mul_(self.scale)
            if self.number is not None and method is not None:
                method.dense_averaged(self.number, self.grad)


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs of real numbers, which every host can sum: a view, (..., 2). Others as they are."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def written_out(grad: Tensor) -> Tensor:
    """A gradient without shared entries, as ``expand()`` makes them: averages are written to it."""
    return grad.contiguous() if any(n > 1 and s == 0 for n, s in zip(grad.shape, grad.stride(), strict=True)) else grad


def dense_gradient(number: int | None, parameter: Tensor, grad: Tensor, half: bool, scale: float) -> DenseGradient:
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
        reciprocal: multiplies sums by ``1 / ranks``, for the bits of Horovod's averages, in place of dividing them.
    """

    #: Entries of one allreduce, unless a single tensor has more.
    CAPACITY = 2**22

    def __init__(
        self, collectives: Collectives, tensors: Sequence[Tensor], label: str, reciprocal: bool = False
    ) -> None:
        self._sizes, self._ranks = [tensor.numel() for tensor in tensors], collectives.size
        self._reciprocal = reciprocal
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
            total = handle.result()
            average = total * (1.0 / self._ranks) if self._reciprocal else total / self._ranks
            results.update(zip(group, torch.split(average, [self._sizes[number] for number in group]), strict=True))
        return [results[number] for number in range(len(self._sizes))]


class DenseAverages:
    """The uncompressed gradients of one exchange, and their averages.

    Args:
        collectives, label: of the engine.
        half: sends float32 and bfloat16 as float16.
    """

    def __init__(self, collectives: Collectives, label: str, half: bool) -> None:
        self._collectives, self._label, self._half = collectives, label, half
        self.begin(1.0, by_host=False)

    def begin(self, scale: float, by_host: bool) -> None:
        """Begins an exchange. ``scale``: the factor of everything that arrives. ``by_host``: the host averages what
        :meth:`arrive` returns, and stores the averages."""
        self.scale, self._by_host = scale, by_host
        self.clear()

    def clear(self) -> None:
        """Drops what has arrived."""
        self._arrived: list[DenseGradient] = []
        self._started: list[tuple[list[DenseGradient], Averaging]] = []
        self._averages: list[tuple[DenseGradient, Tensor]] = []

    def arrive(self, number: int, parameter: Tensor, grad: Tensor) -> DenseGradient:
        """Takes the gradient of a parameter."""
        gradient = dense_gradient(number, parameter, grad, self._half, self.scale)
        if not self._by_host:
            self._arrived.append(gradient)
        return gradient

    def add(self, tensor: Tensor) -> None:
        """Takes a tensor of no parameter, which :meth:`write` replaces by its average."""
        self._arrived.append(dense_gradient(None, tensor, tensor, half=False, scale=1.0))

    def start(self, name: str = "dense", reciprocal: bool = False) -> None:
        """Starts to average what has arrived since the last call. ``name``, ``reciprocal``: see :class:`Averaging`."""
        if self._arrived:
            with stage("dense"):
                payloads = [gradient.payload for gradient in self._arrived]
                averaging = Averaging(self._collectives, payloads, f"{self._label}.{name}", reciprocal)
            self._started.append((self._arrived, averaging))
            self._arrived = []

    def receive(self) -> None:
        """Waits for the averages."""
        for gradients, averaging in self._started:
            with stage("wait"):
                self._averages += zip(gradients, averaging.results(), strict=True)

    def write(self, method: Method | None) -> None:
        """Writes the averages to what has arrived."""
        for gradient, average in self._averages:
            gradient.store(average, method)
        self.clear()


def average_in_place(tensors: Iterable[Tensor], collectives: Collectives, label: str) -> None:
    """Replaces tensors by their averages over ranks. Waits."""
    averages = DenseAverages(collectives, label, half=False)
    for tensor in tensors:
        averages.add(tensor)
    averages.start()
    averages.receive()
    averages.write(None)
