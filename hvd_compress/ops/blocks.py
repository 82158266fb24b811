"""Operators on blocks of 256 entries: see :mod:`hvd_compress.reference.blocks`."""

from torch import Tensor

from ._load import implementation


def accumulate_select(
    grad: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    velocity: Tensor | None,
    floor: Tensor,
    offsets: Tensor,
    invalid: Tensor,
    means: Tensor | None,
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
    due_offsets: Tensor | None = None,
    due_mean: Tensor | None = None,
    due_lost: Tensor | None = None,
    due_slots: int = 0,
    due_first_slot: int = 0,
    due_phase: int = 0,
) -> None:
    """Take a gradient into the residual and write the offsets of the entries that this rank picks as leader.

    ``grad``, ``weight``: n entries, dense, in one memory order; float32, float16 or bfloat16, both the same. Without a
    weight, the score is the residual's magnitude.
    ``residual``, ``velocity``: float32, (blocks * 256,), contiguous, blocks * 256 >= n. ``floor``: float32, (1,), >= 0.
    ``offsets``: uint8, this rank's whole plane. ``invalid``: int32, (1,), set to 1 by an entry that is not finite.
    ``means``: float32, (blocks,), contiguous; with None the blocks' means stay where they are, and the gradient becomes
    zero (otherwise :func:`put` writes all of it).
    ``slots``: 0 (accumulate only) to blocks * 256. ``0 <= position < ranks``, ``run >= 1``, ``0 <= explore <= 2**32``.
    ``due_offsets``, uint8, ``due_mean`` and ``due_lost``, float32: all slots of the last exchange, of which these
    entries' ``due_slots`` begin at ``due_first_slot``: what :func:`put` without ``lost`` has left to do, in its
    ``due_phase``. Other memory than ``offsets``.
    Raises RuntimeError for another dtype, device or size, or if the picks would not fit in ``offsets``.
    """
    # fmt: off
    implementation.accumulate_select(grad, residual, weight, velocity, floor, offsets, invalid, means, scale,
                                      momentum, slots, first_slot, phase, run, ranks, position, key, explore,
                                      due_offsets, due_mean, due_lost, due_slots, due_first_slot, due_phase)
    # fmt: on


def select(
    score: Tensor,
    offsets: Tensor,
    slots: int,
    first_slot: int,
    phase: int,
    run: int,
    ranks: int,
    position: int,
    key: int,
    explore: int,
) -> None:
    """Write the offsets of the entries that this rank picks as leader, by a ``score`` that is already there.

    ``score``: float32, (blocks * 256,), contiguous. The rest as in :func:`accumulate_select`, and so are the errors.
    """
    implementation.select(score, offsets, slots, first_slot, phase, run, ranks, position, key, explore)


def take(residual: Tensor, offsets: Tensor, segments: Tensor, values: Tensor, phase: int) -> None:
    """Read the entries at ``offsets`` into ``values``.

    ``residual``: float32, the whole bucket, a multiple of 256 entries. ``offsets``: uint8, all slots.
    ``segments``: int64, (parameters, 4): first block, blocks, first slot, slots; ascending. ``values``: float32, all
    slots. Raises RuntimeError for another dtype, device or size. What ``segments`` holds is checked on the CPU only: on
    CUDA, values of slots that are in no segment of the bucket stay as they are.
    """
    implementation.take(residual, offsets, segments, values, phase)


def put(
    grads: list[Tensor],
    residual: Tensor,
    velocity: Tensor | None,
    offsets: Tensor,
    segments: Tensor,
    mean: Tensor,
    lost: Tensor | None,
    phase: int,
    scale: float,
    block_means: Tensor | None = None,
) -> None:
    """Assign ``mean * scale`` to the gradients' entries at ``offsets``, whose other entries stay as they are, and
    ``lost`` to the residual's. With ``block_means``, the others become their block's, and those have it on top. Without
    ``lost``, residual and velocity stay as they are: that part is due (:func:`accumulate_select`).

    ``grads``: a dense tensor a segment, float32, float16 or bfloat16, written in memory order; an empty one is skipped.
    ``velocity``: as the residual. ``mean``, ``lost``: float32, all slots. ``block_means``: float32, (blocks,) of the
    bucket, contiguous. ``residual``, ``offsets``, ``segments`` as in
    :func:`take`. Raises RuntimeError for another dtype, device, size or number of gradients.
    """
    implementation.put(grads, residual, velocity, offsets, segments, mean, lost, phase, scale, block_means)
