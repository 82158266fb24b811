"""Gradients that are averaged without compression: small tensors, biases, norms."""

from collections import defaultdict
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from .bucket import in_order_of, is_dense
from .collectives import Request
from .exchange import Exchange, Exchanges
from .method import Method
from .profiling import stage
from .shards import local
from .streams import stream_order


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


class DenseAverages:
    """The uncompressed gradients of one step, and their averages, by few exchanges.

    Args:
        exchanges: of the engine.
        half: sends float32 and bfloat16 as float16.
    """

    #: Entries of one exchange, unless a single gradient has more.
    CAPACITY = 2**22

    def __init__(self, exchanges: Exchanges, half: bool) -> None:
        self._exchanges, self._half = exchanges, half
        self._order = cache(stream_order)
        self.begin(1.0, by_host=False)
        self.clear()

    def begin(self, scale: float, by_host: bool) -> None:
        """Begins a step. ``scale``: the loss scale of everything that arrives. ``by_host``: the host averages what
        :meth:`arrive` returns, and stores the averages."""
        self.scale, self.by_host = scale, by_host

    def clear(self) -> None:
        """Drops what has arrived."""
        self._arrived: list[DenseGradient] = []
        self._averages: list[tuple[list[DenseGradient], Tensor]] = []

    def arrive(self, number: int | None, like: Tensor, grad: Tensor) -> DenseGradient:
        """Takes the gradient of parameter ``number``, or another tensor, which is sent as it is. The payload is in the
        memory order of ``like``, the parameter."""
        weight = as_real(local(like))
        ordered = in_order_of(weight, grad) if is_dense(weight) else grad.contiguous()
        # Loss scales may differ between ranks, and 65536 would leave float16 no range.
        scale = 1.0 if number is None else self.scale
        if ordered.dtype == torch.float16:  # they have no bits to spare, and torch.amp.GradScaler refuses them
            scale = 1.0
        elif ordered.dtype == torch.bfloat16:  # Horovod cannot sum it
            ordered = ordered.float()
        if scale != 1.0:
            ordered = ordered / scale
        if self._half and number is not None and ordered.dtype == torch.float32:
            ordered = ordered.half()
        flat = ordered.as_strided((ordered.numel(),), (1,))
        gradient = DenseGradient(number, grad, flat, ordered.stride(), scale)
        if not self.by_host:
            self._order(flat.device).note_input()
            self._arrived.append(gradient)
        return gradient

    def start(self, name: str = "dense", reciprocal: bool = False) -> None:
        """Starts to average what has arrived since the last call, in the same order on all ranks. ``name``: of the
        exchanges. ``reciprocal``: multiplies sums by ``1 / ranks``, as Horovod and DDP do, in place of dividing them,
        and sums all tensors of a dtype at once."""
        groups, sizes = defaultdict[object, list[list[DenseGradient]]](list), dict[object, int]()
        for gradient in self._arrived:
            payload = gradient.payload
            alike = groups[key := (payload.dtype, payload.device)]
            size = sizes.get(key, 0) + payload.numel()
            if not alike or (size > self.CAPACITY and not reciprocal):
                alike.append([])
                size = payload.numel()
            alike[-1].append(gradient)
            sizes[key] = size
        self._arrived = []
        for number, group in enumerate(group for alike in groups.values() for group in alike):
            order = self._order(group[0].payload.device)
            self._exchanges.launch(f"{name}.{number}", order, self._average(group, reciprocal), "dense")

    def _average(self, group: list[DenseGradient], reciprocal: bool) -> Exchange:
        flat, ranks = torch.cat([gradient.payload for gradient in group]), self._exchanges.nodes.everyone.size
        total = yield Request("allreduce", flat, "dense_tensor", then="dense", level="everyone")
        self._averages.append((group, total * (1.0 / ranks) if reciprocal else total / ranks))

    def write(self, method: Method | None) -> None:
        """Writes the averages to what has arrived, after the exchanges have ended."""
        for group, average in self._averages:
            order = self._order(average.device)
            with order:
                parts = torch.split(average, [gradient.payload.numel() for gradient in group])
                for gradient, part in zip(group, parts, strict=True):
                    gradient.store(part, method)
                order.release(average)
        self._averages = []
