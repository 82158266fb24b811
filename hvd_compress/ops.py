"""The compiled operators: a typed wrapper each, with the fake kernel (for ``torch.compile``) beside it.

What each operator computes is written in :mod:`hvd_compress.reference`, which also takes over where the extension
was not built (slow: a warning says so once). ``COMPILED`` tells which; ``COMPILED_CUDA`` tells it for CUDA tensors.

Every operator mutates its arguments and returns nothing. Tensors are of one device; a bad argument raises a
``RuntimeError`` that says what was got and what is allowed (from the compiled operators; the reference checks nothing).
"""

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import reference

_NAMES = ("accumulate_select", "take", "put")


def _load(module: str) -> str | None:
    """Load the extension ``module``, which registers its operators; or say why it could not be."""
    spec = importlib.util.find_spec(f"{__package__}.{module}")
    if spec is None or spec.origin is None:
        return "it was not built"
    try:
        # Not imported: the extension knows nothing of Python, it only registers operators with torch.
        loader: Any = torch.ops
        loader.load_library(spec.origin)
    except OSError as error:
        return str(error)
    return None


def _slow_cuda(function: Callable[..., None], reason: str) -> Callable[..., None]:
    def kernel(*args: Any) -> None:
        warnings.warn(f"hvd_compress: slow PyTorch code for CUDA tensors ({reason})", RuntimeWarning, stacklevel=2)
        function(*args)

    return kernel


_missing = _load("_C")
_missing_cuda = _missing or _load("_C_cuda")
COMPILED: bool = _missing is None
COMPILED_CUDA: bool = _missing_cuda is None
_implementation: Any = torch.ops.hvd_compress if COMPILED else reference

if _missing is not None:
    warnings.warn(f"hvd_compress: slow PyTorch code: no extension ({_missing})", RuntimeWarning, stacklevel=2)
elif _missing_cuda is not None:
    for _name in _NAMES:
        _kernel = _slow_cuda(getattr(reference, _name), _missing_cuda)
        torch.library.register_kernel(f"hvd_compress::{_name}", "cuda", _kernel)


def _fake(*args: Any) -> None:
    """Shapes of the results, without computing: there are none, the arguments are mutated."""


def accumulate_select(
    grad: Tensor,
    residual: Tensor,
    weight: Tensor,
    velocity: Tensor | None,
    floor: Tensor,
    offsets: Tensor,
    invalid: Tensor,
    scale: float,
    momentum: float,
    slots: int,
    first_slot: int,
    phase: int,
    run: int,
    ranks: int,
    position: int,
    key: int,
    explore: int,
) -> None:
    """Take a gradient into the residual, zero it, and write the offsets of the entries that this rank picks as leader.

    ``grad``, ``weight``: n entries, dense, in one memory order; float32, float16 or bfloat16, both the same.
    ``residual``, ``velocity``: float32, (blocks * 256,), contiguous, blocks * 256 >= n. ``floor``: float32, (1,), >= 0.
    ``offsets``: uint8, this rank's whole plane. ``invalid``: int32, (1,), set to 1 by an entry that is not finite.
    ``slots``: 0 (accumulate only) to blocks * 256. ``0 <= position < ranks``, ``run >= 1``, ``0 <= explore <= 2**32``.
    Raises RuntimeError for another dtype, device or size, or if the picks would not fit in ``offsets``.
    """
    # fmt: off
    _implementation.accumulate_select(grad, residual, weight, velocity, floor, offsets, invalid, scale, momentum,
                                      slots, first_slot, phase, run, ranks, position, key, explore)
    # fmt: on


def take(
    residual: Tensor,
    velocity: Tensor | None,
    offsets: Tensor,
    segments: Tensor,
    invalid: Tensor,
    payload: Tensor,
    phase: int,
    limit: float,
) -> None:
    """Move the entries at ``offsets`` from the residual into ``payload``; what the cast lost stays behind.

    ``residual``, ``velocity``: float32, the whole bucket, a multiple of 256 entries. ``offsets``: uint8, all slots.
    ``segments``: int64, (parameters, 5): first block, blocks, first slot, slots, entries; ascending.
    ``invalid``: int32, (1,). ``payload``: float32 or float16, all slots. ``limit``: > 0, the largest magnitude sent.
    Raises RuntimeError for another dtype, device or size (what ``segments`` holds is checked on the CPU only).
    """
    _implementation.take(residual, velocity, offsets, segments, invalid, payload, phase, limit)


def put(
    grads: list[Tensor],
    residual: Tensor,
    offsets: Tensor,
    segments: Tensor,
    total: Tensor,
    sent: Tensor,
    phase: int,
    scale: float,
) -> None:
    """Assign ``total * scale`` to the gradients' entries at ``offsets``, whose other entries stay as they are.

    ``grads``: a dense tensor a segment, float32, float16 or bfloat16, written in memory order; an empty one is skipped.
    ``total``, ``sent``: float32 or float16, all slots. ``residual``, ``offsets``, ``segments`` as in :func:`take`.
    Raises RuntimeError for another dtype, device, size or number of gradients.
    """
    _implementation.put(grads, residual, offsets, segments, total, sent, phase, scale)


if COMPILED:
    for _name in _NAMES:
        torch.library.register_fake(f"hvd_compress::{_name}", _fake)
