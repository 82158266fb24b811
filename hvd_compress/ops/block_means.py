"""Operators on blocks' means: see :mod:`hvd_compress.reference.block_means`.

All tensors but ``invalid`` are float32, (blocks,), contiguous, each in memory of its own. Raises RuntimeError for
another dtype, device or size.
"""

from torch import Tensor

from ._load import implementation


def block_means_send(
    fresh: Tensor, unsent: Tensor, velocity: Tensor | None, out: Tensor, invalid: Tensor, momentum: float
) -> None:
    """Add ``fresh``, through the ``velocity`` if there is one, to ``unsent``; copy that to ``out``; zero ``fresh``.

    ``invalid``: int32, (1,), set to 1 by a sum that is not finite: its block stays as it is.
    """
    implementation.block_means_send(fresh, unsent, velocity, out, invalid, momentum)


def block_means_keep(mean: Tensor, quantization_error: Tensor, unsent: Tensor) -> None:
    """``unsent`` becomes ``quantization_error`` where the ``mean`` is finite."""
    implementation.block_means_keep(mean, quantization_error, unsent)
