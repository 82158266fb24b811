"""Gradients that are allreduced without compression: small tensors, biases, norms."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .bucket import in_order_of, is_dense


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


def dense_gradient(number: int, parameter: Tensor, grad: Tensor, half: bool, scale: float) -> DenseGradient:
    """``half``: send float32 and bfloat16 as float16. ``scale``: the loss scale; float16 payloads are divided by it,
    since a scale of 65536 would leave them no range."""
    ordered = in_order_of(parameter, grad) if is_dense(parameter) else grad.contiguous()
    if half and ordered.dtype in (torch.float32, torch.bfloat16):
        ordered = (ordered / scale).half()
    else:
        scale = 1.0
        if ordered.dtype == torch.bfloat16:  # Horovod cannot sum it
            ordered = ordered.float()
    return DenseGradient(number, grad, ordered.as_strided((ordered.numel(),), (1,)), ordered.stride(), scale)
