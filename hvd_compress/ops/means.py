"""Operators on blocks' means: see :mod:`hvd_compress.reference.means`.

All tensors but ``invalid`` are float32, (blocks,), contiguous, each in memory of its own. Raises RuntimeError for
another dtype, device or size.
"""

from torch import Tensor

from ._load import implementation


def means_send(
    fresh: Tensor, held: Tensor, velocity: Tensor | None, out: Tensor, invalid: Tensor, momentum: float
) -> None:
    """Add ``fresh``, through the ``velocity`` if there is one, to ``held``; copy that to ``out``; zero ``fresh``.

    ``invalid``: int32, (1,), set to 1 by a sum that is not finite: its block stays as it is.
    """
    implementation.means_send(fresh, held, velocity, out, invalid, momentum)


def means_keep(mean: Tensor, lost: Tensor, held: Tensor) -> None:
    """``held`` becomes ``lost`` where the ``mean`` is finite."""
    implementation.means_keep(mean, lost, held)
