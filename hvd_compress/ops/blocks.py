"""Operators on blocks of 256 entries: see :mod:`hvd_compress.reference.blocks`."""

from torch import Tensor

from ._load import implementation


def accumulate_select(
    grad: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    velocity: Tensor | None,
    floor: Tensor,
    indices: Tensor,
    invalid: Tensor,
    block_means: Tensor | None,
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
    deferred_indices: Tensor | None = None,
    deferred_mean: Tensor | None = None,
    deferred_error: Tensor | None = None,
    deferred_slots: int = 0,
    deferred_first_slot: int = 0,
    deferred_phase: int = 0,
) -> None:
    """Add a gradient to the residual and write the indices of the entries that this rank selects as leader.

    ``grad``, ``weight``: n entries, dense, in one memory order; float32, float16 or bfloat16, both the same. Without a
    weight, the score is the residual's magnitude.
    ``residual``, ``velocity``: float32, (blocks * 256,), contiguous, blocks * 256 >= n. ``floor``: float32, (1,), >= 0.
    ``indices``: uint8, for all slots that this rank leads. ``invalid``: int32, (1,), set to 1 by a non-finite entry.
    ``block_means``: float32, (blocks,), contiguous: the blocks' means are added to it instead of the residual. With
    None the gradient is set to zero; otherwise :func:`scatter` writes all of it.
    ``slots``: 0 (accumulate only) to blocks * 256. ``0 <= position < ranks``, ``run >= 1``, ``0 <= explore <= 2**32``.
    ``deferred_indices``, uint8, ``deferred_mean`` and ``deferred_error``, float32: all slots of the last exchange, if
    its residual update was deferred (:func:`scatter` without ``quantization_error``). It is done first, for the
    ``deferred_slots`` slots from ``deferred_first_slot`` on. ``deferred_indices`` must not overlap ``indices``.
    Raises RuntimeError for another dtype, device or size, or if ``indices`` is too small.
    """
    # fmt: off
    implementation.accumulate_select(
        grad, residual, weight, velocity, floor, indices, invalid, block_means, scale, momentum,
        slots, first_slot, phase, run, ranks, position, key, explore,
        deferred_indices, deferred_mean, deferred_error, deferred_slots, deferred_first_slot, deferred_phase,
    )
    # fmt: on


def select(
    score: Tensor,
    indices: Tensor,
    slots: int,
    first_slot: int,
    phase: int,
    run: int,
    ranks: int,
    position: int,
    key: int,
    explore: int,
) -> None:
    """Write the indices of the entries with the largest ``score`` that this rank selects as leader.

    ``score``: float32, (blocks * 256,), contiguous. Other arguments and errors are as in :func:`accumulate_select`.
    """
    implementation.select(score, indices, slots, first_slot, phase, run, ranks, position, key, explore)


def gather(residual: Tensor, indices: Tensor, segments: Tensor, values: Tensor, phase: int) -> None:
    """Copy the residual's entries at ``indices`` to ``values``.

    ``residual``: float32, the whole bucket, a multiple of 256 entries. ``indices``: uint8, all slots.
    ``segments``: int64, (parameters, 4): first block, blocks, first slot, slots; ascending. ``values``: float32, all
    slots. Raises RuntimeError for another dtype, device or size. The contents of ``segments`` are checked on the CPU
    only; on CUDA, values of slots outside the bucket's segments are not written.
    """
    implementation.gather(residual, indices, segments, values, phase)


def scatter(
    grads: list[Tensor],
    residual: Tensor,
    velocity: Tensor | None,
    indices: Tensor,
    segments: Tensor,
    mean: Tensor,
    quantization_error: Tensor | None,
    phase: int,
    scale: float,
    block_means: Tensor | None = None,
) -> None:
    """Assign ``mean * scale`` to the gradients' entries at ``indices`` and ``quantization_error`` to the residual's.

    With ``block_means``, every other entry of the gradients is assigned its block's mean, and those at ``indices`` the
    sum. Without ``quantization_error``, residual and velocity are unchanged: their update is deferred to
    :func:`accumulate_select`.

    ``grads``: for each segment a dense tensor, float32, float16 or bfloat16, written in memory order, or an empty one,
    which is skipped. ``velocity``: as the residual. ``mean``, ``quantization_error``: float32, all slots.
    ``block_means``: float32, (blocks,) of the bucket, contiguous. ``residual``, ``indices``, ``segments``: as in
    :func:`gather`. Raises RuntimeError for another dtype, device, size or number of gradients.
    """
    implementation.scatter(
        grads, residual, velocity, indices, segments, mean, quantization_error, phase, scale, block_means
    )
