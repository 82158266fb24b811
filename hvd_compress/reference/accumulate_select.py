"""Error feedback and the selection of entries. The vocabulary is that of :mod:`.blocks`."""

import torch
from torch import Tensor

from .blocks import BLOCK, MASK, OVERFLOW, exponential, mix, slot_start, slots_before, usable
from .hadamard import GAIN, hadamard
from .scatter import scatter


def accumulate_select(
    grad: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    velocity: Tensor | None,
    floor: Tensor,
    indices: Tensor,
    invalid: Tensor,
    touched: Tensor,
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
    decay: float = 1.0,
    transform: bool = False,
) -> None:
    """Add a gradient to the residual and write the indices of the entries that this rank selects as leader.

    Per entry, with ``g = grad * scale``, from which the mean of its block is subtracted if ``block_means`` is given::

        velocity <- momentum * velocity + g      (only with a velocity; otherwise velocity stands for g)
        residual <- decay * residual + velocity
        score     = |residual| / (|weight| + floor)      (without a weight: |residual|)

    The block's mean is added to ``block_means`` (0 if its sum is not :func:`usable`). Where ``g`` is not
    :func:`usable`, residual and velocity are kept, and ``invalid`` is set to 1. Then :func:`select` is called with the
    score, which is 0 in the padding.

    With ``transform``, ``g`` is the :func:`hadamard` transform of ``grad * scale``, padded with zeros, and everything
    else holds coefficients, padding included. Entries from ``OVERFLOW / 16`` on then count as 0 and set ``invalid``.

    ``touched`` is set to 1 if an entry of ``grad`` is not zero; NaN and infinity are not.

    ``grad`` is set to 0; with ``block_means`` or ``transform`` it is not written, because :func:`scatter` writes all of
    it.

    With ``deferred_indices``, the residual update of the last exchange (the part of :func:`scatter` with
    ``quantization_error``) is done first, for ``deferred_slots`` slots from ``deferred_first_slot`` on.

    ``grad``, ``weight``: n entries, dense, in one memory order, float32, float16 or bfloat16.
    ``residual``, ``velocity``: float32, (blocks * 256,). ``floor``: float32, (1,), >= 0. ``indices``: uint8, for all
    slots of the bucket that this rank leads. ``invalid``, ``touched``: int32, (1,). ``block_means``: float32,
    (blocks,). ``slots`` 0 only accumulates. ``deferred_indices``, uint8, ``deferred_mean``, ``deferred_error``,
    float32: all slots of the last exchange; ``deferred_phase``: its phase. ``transform`` goes without ``weight`` and
    ``block_means``.
    """
    if deferred_indices is not None and deferred_mean is not None and deferred_error is not None:
        mine = slice(deferred_first_slot, deferred_first_slot + deferred_slots)
        row = torch.tensor([[0, residual.numel() // BLOCK, 0, deferred_slots]], dtype=torch.int64, device="cpu")
        skipped, sent, error = [residual.new_empty(0)], deferred_mean[mine], deferred_error[mine]
        scatter(skipped, residual, velocity, deferred_indices[mine], row, sent, error, deferred_phase, 0.0)
    n = grad.numel()
    flat = grad.as_strided((n,), (1,))
    touched |= flat.any().to(torch.int32)
    step = flat.float() * scale
    if block_means is not None:
        mean = mean_of_blocks(step, len(block_means))
        block_means += mean
        step -= mean.repeat_interleave(BLOCK)[:n]
    fits = usable(step, OVERFLOW / GAIN if transform else OVERFLOW)
    invalid |= (~fits.all()).to(torch.int32)
    if transform:
        step = torch.nn.functional.pad(step.where(fits, 0.0), (0, residual.numel() - n))
        hadamard(step)
        n, fits = residual.numel(), torch.ones_like(step, dtype=torch.bool)
    if velocity is not None:
        step = velocity[:n] * momentum + step
        velocity[:n] = torch.where(fits, step, velocity[:n])
    residual[:n] = torch.where(fits, residual[:n] * decay + step, residual[:n])
    if block_means is None and not transform:
        flat.zero_()
    if slots == 0:
        return
    score = torch.zeros_like(residual)
    score[:n] = residual[:n].abs()
    if weight is not None:
        score[:n] /= weight.as_strided((n,), (1,)).float().abs() + floor
    select(score, indices, slots, first_slot, phase, run, ranks, position, key, explore)


def mean_of_blocks(entries: Tensor, blocks: int) -> Tensor:
    """The mean of each block's entries without the padding, or 0 if their sum is not usable: float32, (blocks,).

    Computed by pairwise summation: the upper half is added to the lower until one number is left, on every back end.
    """
    sums = torch.nn.functional.pad(entries, (0, blocks * BLOCK - entries.numel())).view(blocks, BLOCK)
    while sums.shape[1] > 1:
        lower, upper = sums.chunk(2, dim=1)
        sums = lower + upper
    begin = torch.arange(blocks, dtype=torch.int64, device=entries.device) * BLOCK
    inside = (entries.numel() - begin).clamp(1, BLOCK)
    return torch.where(usable(sums[:, 0]), sums[:, 0] / inside, 0.0)


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
    """Write the indices of the entries with the largest ``score`` (>= 0; a NaN counts as 0), as leader.

    In a block in which this rank leads ``c > 0`` slots, the indices of the ``c`` largest scores are written in
    ascending order; of equal scores, the lower index is preferred. In a share ``explore / 2**32`` of the blocks, each
    score is first divided by a draw from an exponential distribution: the result is a sample without replacement with
    probabilities proportional to the score.

    ``score``: float32, (blocks * 256,). ``indices``: uint8, for all slots of the bucket that this rank leads.
    """
    if slots == 0:
        return
    device, blocks = score.device, score.numel() // BLOCK
    score = score.nan_to_num(nan=0.0, posinf=float("inf")).view(blocks, BLOCK)
    block = torch.arange(blocks + 1, dtype=torch.int64, device=device)
    inside = torch.arange(BLOCK, dtype=torch.int64, device=device)
    explored = mix(block[:-1], key ^ 0x5BD1E995) < explore
    if explored.any():
        entry = (block[:-1][explored, None] * BLOCK + inside) & MASK
        score[explored] /= exponential(mix(entry, key))
    start = slots_before(first_slot + slot_start(block, slots, blocks, phase), run, ranks, position)
    count = start.diff()
    ranking = score.sort(dim=1, descending=True, stable=True).indices
    chosen = torch.zeros_like(score, dtype=torch.bool)
    chosen.scatter_(1, ranking, inside < count[:, None])
    indices[start[0] : start[-1]] = chosen.nonzero()[:, 1].to(torch.uint8)
