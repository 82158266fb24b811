"""Places of the compressed parameters, and the gradients that they can have."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .bucket import Piece, is_dense
from .shards import local, shards
from .work import Work

# Of parameters, and of gradients, which may differ (Tensor.grad_dtype). float64 is used for gradient checks, not for
# training over a slow network: it is not compressed.
_COMPRESSED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a compressed parameter: in the bucket of ``work``, as the piece number ``index``."""

    work: Work
    index: int

    @property
    def piece(self) -> Piece:
        return self.work.bucket.pieces[self.index]


def is_large(parameter: Tensor, min_numel: int) -> bool:
    """Whether a parameter has two or more dimensions and, on average over its shards, ``min_numel`` entries."""
    return parameter.dim() >= 2 and parameter.numel() // shards(parameter) >= min_numel


def compressed(
    named: Sequence[tuple[str, torch.nn.Parameter]], min_numel: int, compresses: Callable[[Tensor], bool]
) -> list[tuple[int, str, torch.nn.Parameter]]:
    """The numbers, names and parameters that are compressed, of all ``(name, parameter)`` pairs. ``compresses``:
    whether the method compresses a parameter, or this rank's shard of one."""

    def fits(weight: Tensor) -> bool:
        some = weight.numel() > 0
        return some and weight.dtype in _COMPRESSED_DTYPES and is_dense(weight) and compresses(weight)

    large = ((n, name, p) for n, (name, p) in enumerate(named) if p.requires_grad and is_large(p, min_numel))
    return [(number, name, p) for number, name, p in large if fits(local(p).detach())]


def check_gradient(name: str, grad: Tensor, place: Place | None) -> None:
    """Raises ``TypeError`` if the gradient's dtype does not fit, ``ValueError`` if the parameter's device, shape or
    memory order has changed. ``place``: None if the parameter is not compressed."""
    if not grad.is_floating_point():
        raise TypeError(f"{name}: gradient of dtype {grad.dtype}; allowed are float32, float16, bfloat16, float64")
    if place is None:
        return
    if grad.dtype not in _COMPRESSED_DTYPES:
        raise TypeError(
            f"{name}: its gradient is of dtype {grad.dtype}, which is not compressed: change the model's dtype before "
            "building the compressor"
        )
    bucket = place.work.bucket
    if bucket.device != grad.device:
        raise ValueError(
            f"{name}: was on {bucket.device} when the compressor was built and its gradient is on {grad.device}; "
            "build the compressor after moving the model"
        )
    piece = bucket.pieces[place.index]
    weight = local(piece.parameter)  # not what stands in for it
    shape, stride = weight.shape, weight.stride()
    if shape != piece.shape:
        raise ValueError(
            f"{piece.name}: was of shape {tuple(piece.shape)} when the compressor was built and is of shape "
            f"{tuple(shape)} now; build a new compressor and a new optimizer"
        )
    # Strides of dimensions of one entry mean nothing.
    if stride != piece.stride and any(n > 1 and a != b for n, a, b in zip(shape, piece.stride, stride, strict=True)):
        raise ValueError(
            f"{piece.name}: had strides {piece.stride} when the compressor was built and has {stride} now; call "
            "model.to(memory_format=...) before building the compressor"
        )
