"""Error feedback and the selection of entries. The vocabulary is that of :mod:`.blocks`."""

from typing import NamedTuple

import torch
from torch import Tensor

from .blocks import BLOCK, MASK, OVERFLOW, exponential, mix, slot_start, slots_before, usable
from .hadamard import GAIN, hadamard


class Draw(NamedTuple):
    """The slots that a rank selects as leader in a step, and at random: the last arguments of :func:`accumulate_select`
    and :func:`select`.

    ``phase``, ``run``, ``ranks``, ``position``: see :mod:`.blocks`. ``key``: of the step's random numbers; piece ``i``
    has the key ``mix(i, key)``. In a share ``explore / 2**32`` of the blocks, entries are drawn at random.
    """

    phase: int
    run: int
    ranks: int
    position: int
    key: int
    explore: int


def accumulate_select(
    grads: list[Tensor],
    residual: Tensor,
    weights: list[Tensor],
    velocity: Tensor | None,
    pieces: Tensor,
    floors: Tensor,
    indices: Tensor,
    invalid: Tensor,
    touched: Tensor,
    block_means: Tensor | None,
    scale: float,
    momentum: float,
    decay: float,
    transform: bool,
    phase: int,
    run: int,
    ranks: int,
    position: int,
    key: int,
    explore: int,
) -> None:
    """Add a bucket's gradients to the residual and write the indices of the entries that this rank selects as leader.

    Per entry, with ``g = grad * scale``, from which the mean of its block is subtracted if ``block_means`` is given::

        velocity <- momentum * velocity + g      (only with a velocity; otherwise velocity stands for g)
        residual <- decay * residual + velocity
        score     = |residual| / (|weight| + floor)      (without weights: |residual|)

    The block's mean is added to ``block_means`` (0 if its sum is not :func:`usable`). Where ``g`` is not
    :func:`usable`, residual and velocity are kept, and ``invalid`` is set to 1. In the padding, ``g`` and the weight
    are 0. Then :func:`select` is called with the scores.

    With ``transform``, ``g`` is the :func:`hadamard` transform of ``grad * scale``, padded with zeros, and everything
    else holds coefficients, padding included. Entries from ``OVERFLOW / 16`` on then count as 0 and set ``invalid``.

    A piece's ``touched`` is set to 1 if an entry of its gradient is not zero; NaN and infinity are not.

    Gradients are set to 0; with ``block_means`` or ``transform`` they are not written, because :func:`scatter` writes
    all of them.

    ``grads``: for each piece a dense tensor of as many blocks, in memory order, float32, float16 or bfloat16, or an
    empty one: then the piece is skipped, and none of its entries selected. ``weights``: none, or one for each gradient,
    of its size, memory order and dtype. ``residual``, ``velocity``: float32, (blocks * 256,) of the bucket.
    ``pieces``: as in :func:`gather`; a piece with 0 slots is only accumulated. ``floors``: float32, (pieces,), >= 0;
    read only with weights. ``indices``: uint8, for all slots of the bucket that this rank leads. ``invalid``: int32,
    (1,). ``touched``: int32, (pieces,). ``block_means``: float32, (blocks,). ``transform`` goes without weights and
    ``block_means``. The last six: :class:`Draw`.
    """
    scores = [residual.new_empty(0)] * len(grads)
    for i, (first_block, blocks, _, _) in enumerate(pieces.tolist()):
        n = grads[i].numel()
        if n == 0:
            continue
        flat, place = _flat(grads[i]), slice(first_block * BLOCK, (first_block + blocks) * BLOCK)
        touched[i] |= flat.any().to(torch.int32)
        step = flat.float() * scale
        if block_means is not None:
            mean = mean_of_blocks(step, blocks)
            block_means[first_block : first_block + blocks] += mean
            step -= mean.repeat_interleave(BLOCK)[:n]
        fits = usable(step, OVERFLOW / GAIN if transform else OVERFLOW)
        invalid |= (~fits.all()).to(torch.int32)
        step = _padded(step.where(fits, 0.0) if transform else step, blocks)
        if transform:
            hadamard(step)
        fits = usable(step)
        if velocity is not None:
            step = velocity[place] * momentum + step
            velocity[place] = torch.where(fits, step, velocity[place])
        residual[place] = torch.where(fits, residual[place] * decay + step, residual[place])
        if block_means is None and not transform:
            flat.zero_()
        scores[i] = residual[place].abs()
        if weights:
            scores[i] /= _padded(_flat(weights[i]).float().abs(), blocks) + floors[i]
    select(scores, pieces, indices, phase, run, ranks, position, key, explore)


def _flat(tensor: Tensor) -> Tensor:
    """The entries of a dense tensor in memory order: a view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _padded(entries: Tensor, blocks: int) -> Tensor:
    """Pads with zeros up to ``blocks`` blocks."""
    return torch.nn.functional.pad(entries, (0, blocks * BLOCK - entries.numel()))


def mean_of_blocks(entries: Tensor, blocks: int) -> Tensor:
    """The mean of each block's entries without the padding, or 0 if their sum is not usable: float32, (blocks,).

    Computed by pairwise summation: the upper half is added to the lower until one number is left, on every back end.
    """
    sums = _padded(entries, blocks).view(blocks, BLOCK)
    while sums.shape[1] > 1:
        lower, upper = sums.chunk(2, dim=1)
        sums = lower + upper
    begin = torch.arange(blocks, dtype=torch.int64, device=entries.device) * BLOCK
    inside = (entries.numel() - begin).clamp(1, BLOCK)
    return torch.where(usable(sums[:, 0]), sums[:, 0] / inside, 0.0)


def select(
    scores: list[Tensor],
    pieces: Tensor,
    indices: Tensor,
    phase: int,
    run: int,
    ranks: int,
    position: int,
    key: int,
    explore: int,
) -> None:
    """Write the indices of the entries with the largest scores (>= 0; a NaN counts as 0), as leader.

    In a block in which this rank leads ``c > 0`` slots, the indices of the ``c`` largest scores are written in
    ascending order; of equal scores, the lower index is preferred. In the share ``explore`` of the blocks, each score
    is first divided by a draw from an exponential distribution: the result is a sample without replacement with
    probabilities proportional to the score.

    ``scores``: for each piece as many blocks, float32, (entries,), or an empty tensor: then the piece is skipped. In
    the padding, scores are 0. ``pieces``, ``indices`` and the last six: as in :func:`accumulate_select`.
    """
    for i, (_, blocks, first_slot, slots) in enumerate(pieces.tolist()):
        if slots == 0 or scores[i].numel() == 0:
            continue
        device, own_key = indices.device, mix(i, key)
        score = _padded(scores[i].nan_to_num(nan=0.0, posinf=float("inf")), blocks).view(blocks, BLOCK)
        block = torch.arange(blocks + 1, dtype=torch.int64, device=device)
        inside = torch.arange(BLOCK, dtype=torch.int64, device=device)
        explored = mix(block[:-1], own_key ^ 0x5BD1E995) < explore
        if explored.any():
            entry = (block[:-1][explored, None] * BLOCK + inside) & MASK
            score[explored] /= exponential(mix(entry, own_key))
        start = slots_before(first_slot + slot_start(block, slots, blocks, phase), run, ranks, position)
        ranking = score.sort(dim=1, descending=True, stable=True).indices
        chosen = torch.zeros_like(score, dtype=torch.bool)
        chosen.scatter_(1, ranking, inside < start.diff()[:, None])
        indices[start[0] : start[-1]] = chosen.nonzero()[:, 1].to(torch.uint8)
