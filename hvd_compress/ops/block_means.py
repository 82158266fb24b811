"""Operators on blocks' means: see :mod:`hvd_compress.reference.block_means`.

All tensors but ``invalid`` are float32, (blocks,), contiguous, and must not overlap. Raises RuntimeError for
another dtype, device or size.
"""

from torch import Tensor

from ._load import implementation


def block_means_send(
    fresh: Tensor, unsent: Tensor, velocity: Tensor | None, out: Tensor, invalid: Tensor, momentum: float
) -> None:
    """Add ``fresh``, with momentum if there is a ``velocity``, to ``unsent``; copy the sum to ``out``; zero ``fresh``.

    ``invalid``: int32, (1,), set to 1 by a sum that is not finite; this block's ``unsent`` and ``velocity`` are kept.
    """
    implementation.block_means_send(fresh, unsent, velocity, out, invalid, momentum)


def block_means_keep(mean: Tensor, quantization_error: Tensor, unsent: Tensor) -> None:
    """Set ``unsent`` to ``quantization_error`` where ``mean`` is finite."""
    implementation.block_means_keep(mean, quantization_error, unsent)
