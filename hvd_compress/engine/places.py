"""Which parameters are compressed, where they lie, and which gradients they can have."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .bucket import Bucket, Segment, is_dense

# Of parameters and, independently of these (Tensor.grad_dtype), of gradients. float64 is used for gradient checks, not
# for training over a slow network: it is not compressed.
_COMPRESSED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Place(NamedTuple):
    """Where a compressed parameter lies: ``bucket.segments[position]``."""

    bucket: Bucket
    position: int

    @property
    def segment(self) -> Segment:
        return self.bucket.segments[self.position]


def compressed(
    named: Sequence[tuple[str, torch.nn.Parameter]], min_numel: int, compresses: Callable[[Tensor], bool]
) -> list[tuple[str, torch.nn.Parameter]]:
    """Those of the ``(name, parameter)`` pairs that are compressed. ``compresses``: whether the method compresses a
    parameter that can be."""
    return [
        (name, p)
        for name, p in named
        if p.requires_grad and p.dtype in _COMPRESSED_DTYPES and p.dim() >= 2 and p.numel() >= min_numel
        if is_dense(p) and compresses(p)
    ]


def check_gradient(name: str, parameter: Tensor, grad: Tensor, place: Place | None) -> None:
    """Raises ``TypeError`` if the gradient's dtype does not fit its parameter, ``ValueError`` if the parameter has
    another device, shape or memory order than its place. ``place``: None if the parameter is not compressed."""
    if not grad.is_floating_point():
        raise TypeError(f"{name}: gradient of dtype {grad.dtype}; allowed are float32, float16, bfloat16, float64")
    if place is None:
        return
    if grad.dtype not in _COMPRESSED_DTYPES:
        raise TypeError(
            f"{name}: its gradient is of dtype {grad.dtype}, which is not compressed: change the model's dtype before "
            "building the compressor"
        )
    if place.bucket.device != grad.device:
        raise ValueError(
            f"{name}: was on {place.bucket.device} when the compressor was built and its gradient is on {grad.device}; "
            "build the compressor after moving the model"
        )
    segment = place.segment
    if parameter.stride() != segment.stride or parameter.shape != segment.shape:
        _check_layout(segment)


def _check_layout(segment: Segment) -> None:
    """Raises ``ValueError`` unless only meaningless strides, of dimensions of one entry, have changed."""
    parameter = segment.parameter
    if parameter.shape != segment.shape:
        raise ValueError(
            f"{segment.name}: was of shape {tuple(segment.shape)} when the compressor was built and is of shape "
            f"{tuple(parameter.shape)} now; build a new compressor and a new optimizer"
        )
    if any(n > 1 and a != b for n, a, b in zip(segment.shape, segment.stride, parameter.stride(), strict=True)):
        raise ValueError(
            f"{segment.name}: had strides {segment.stride} when the compressor was built and has {parameter.stride()} "
            "now; call model.to(memory_format=...) before building the compressor"
        )
