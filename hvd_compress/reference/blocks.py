"""Operators on blocks of 256 entries: error feedback, selection of entries, gather and scatter.

Vocabulary
----------
block
    256 consecutive entries of a parameter in memory order. The last block may be padded.
segment
    the blocks of one parameter within a bucket's flat residual.
slot
    one entry to be sent. A segment of ``blocks`` blocks has ``slots`` slots. Block ``b`` has the slots from
    ``slot_start(b)`` to ``slot_start(b + 1)``: any number of slots is spread evenly, and ``phase`` rotates the
    remainder from step to step.
index
    the position of a slot's entry within its block: one byte.
leader
    the rank that selects a slot's entry, by its own residual. Slots are assigned to ranks round-robin in runs of
    ``run`` slots. ``position``, 0 to ``ranks - 1``, is the rank's place in this order; it changes from step to step.
"""

from typing import TypeVar

import torch
from torch import Tensor

Word = TypeVar("Word", int, Tensor)

BLOCK = 256
#: From here on a gradient counts as infinite: its square, and so a norm, overflows float32.
OVERFLOW = 2.0**64
_MASK = 0xFFFFFFFF


def mix(value: Word, key: int) -> Word:
    """A 32-bit hash of ``value`` with ``key``: two multiply-xorshift rounds. For a tensor: int64, below 2**32."""
    value = (value * 0x9E3779B1 + key) & _MASK
    value = ((value ^ (value >> 16)) * 0x21F0AAAD) & _MASK
    value = ((value ^ (value >> 15)) * 0x735A2D97) & _MASK
    return value ^ (value >> 15)


def usable(gradient: Tensor, overflow: float = OVERFLOW) -> Tensor:
    """Whether each entry of a gradient may enter a state: bool. NaN, infinities and magnitudes from ``overflow`` on may
    not."""
    return gradient.abs() < overflow


def exponential(bits: Tensor) -> Tensor:
    """Draws from an exponential distribution (in units of ln 2) from 32 random ``bits`` each: float32, > 0.

    ``-log2(u)``, with a parabola for the logarithm of the mantissa (error below 0.009). All steps are exact or rounded
    by IEEE 754, so the result does not depend on a library's ``log``.
    """
    uniform = ((bits >> 9).float() + 0.5) * 2.0**-23
    word = uniform.view(torch.int32)
    exponent = (127 - (word >> 23)).float()
    part = ((word & 0x7FFFFF) | 0x3F800000).view(torch.float32) - 1.0
    return (exponent - (part + (part * (1.0 - part)) * 0.3466)).clamp_(min=1e-6)


def slot_start(block: Tensor, slots: int, blocks: int, phase: int) -> Tensor:
    """The first slot of ``block`` (int64 tensor) within its segment; ``slot_start(blocks)`` is ``slots``."""
    return (block * slots + phase % blocks) // blocks


def slots_before(slot: Tensor, run: int, ranks: int, position: int) -> Tensor:
    """The number of the bucket's slots before ``slot`` that belong to the rank at ``position``."""
    turn = run * ranks
    return (slot // turn) * run + (slot % turn - position * run).clamp(0, run)


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

    Per entry, with ``g = grad * scale``, from which the mean of its block is subtracted if ``block_means`` is given::

        velocity <- momentum * velocity + g      (only with a velocity; otherwise velocity stands for g)
        residual <- residual + velocity
        score     = |residual| / (|weight| + floor)      (without a weight: |residual|)

    The block's mean is added to ``block_means`` (0 if its sum is not :func:`usable`). Without ``block_means``, ``grad``
    is set to 0; with it, ``grad`` is not written, because :func:`scatter` writes all of it. Where ``g`` is not
    :func:`usable`, residual and velocity are kept, and ``invalid`` is set to 1. Then :func:`select` is called with the
    score, which is 0 in the padding.

    With ``deferred_indices``, the residual update of the last exchange (the part of :func:`scatter` with
    ``quantization_error``) is done first, for ``deferred_slots`` slots from ``deferred_first_slot`` on.

    ``grad``, ``weight``: n entries, dense, in one memory order, float32, float16 or bfloat16.
    ``residual``, ``velocity``: float32, (blocks * 256,). ``floor``: float32, (1,), >= 0. ``indices``: uint8, for all
    slots of the bucket that this rank leads. ``invalid``: int32, (1,). ``block_means``: float32, (blocks,).
    ``slots`` 0 only accumulates. ``deferred_indices``, uint8, ``deferred_mean``, ``deferred_error``, float32: all slots
    of the last exchange; ``deferred_phase``: its phase.
    """
    if deferred_indices is not None and deferred_mean is not None and deferred_error is not None:
        mine = slice(deferred_first_slot, deferred_first_slot + deferred_slots)
        row = torch.tensor([[0, residual.numel() // BLOCK, 0, deferred_slots]])
        skipped, sent, error = [residual.new_empty(0)], deferred_mean[mine], deferred_error[mine]
        scatter(skipped, residual, velocity, deferred_indices[mine], row, sent, error, deferred_phase, 0.0)
    n = grad.numel()
    flat = grad.as_strided((n,), (1,))
    step = flat.float() * scale
    if block_means is not None:
        mean = mean_of_blocks(step, len(block_means))
        block_means += mean
        step -= mean.repeat_interleave(BLOCK)[:n]
    fits = usable(step)
    invalid |= (~fits.all()).to(torch.int32)
    if velocity is not None:
        step = velocity[:n] * momentum + step
        velocity[:n] = torch.where(fits, step, velocity[:n])
    residual[:n] = torch.where(fits, residual[:n] + step, residual[:n])
    if block_means is None:
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
    inside = (entries.numel() - torch.arange(blocks, device=entries.device) * BLOCK).clamp(1, BLOCK)
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
    block = torch.arange(blocks + 1, device=device)
    explored = mix(block[:-1], key ^ 0x5BD1E995) < explore
    if explored.any():
        entry = (block[:-1][explored, None] * BLOCK + torch.arange(BLOCK, device=device)) & _MASK
        score[explored] /= exponential(mix(entry, key))
    start = slots_before(first_slot + slot_start(block, slots, blocks, phase), run, ranks, position)
    count = start.diff()
    ranking = score.sort(dim=1, descending=True, stable=True).indices
    chosen = torch.zeros_like(score, dtype=torch.bool)
    chosen.scatter_(1, ranking, torch.arange(BLOCK, device=device) < count[:, None])
    indices[start[0] : start[-1]] = chosen.nonzero()[:, 1].to(torch.uint8)


def flat_positions(indices: Tensor, segments: Tensor, phase: int) -> Tensor:
    """The position of each slot's entry in the bucket's flat memory: int64, (slots,).

    ``segments`` is read on the host and may be a CPU tensor.
    """
    parts = [indices.new_empty(0, dtype=torch.int64)]
    for first_block, blocks, first_slot, slots in segments.tolist():
        edges = slot_start(torch.arange(blocks + 1, device=indices.device), slots, blocks, phase)
        block = torch.arange(blocks, device=indices.device).repeat_interleave(edges.diff(), output_size=slots)
        parts.append((first_block + block) * BLOCK + indices[first_slot : first_slot + slots].long())
    return torch.cat(parts)


def gather(residual: Tensor, indices: Tensor, segments: Tensor, values: Tensor, phase: int) -> None:
    """Copy the entries at ``indices`` to ``values``.

    ``residual``: float32, the whole bucket. ``indices``: uint8, all slots, in slot order.
    ``segments``: int64, (parameters, 4): first block, blocks, first slot, slots; ascending.
    ``values``: float32, all slots.
    """
    values.copy_(residual[flat_positions(indices, segments, phase)])


def _last(place: Tensor, acts: Tensor, entries: int) -> Tensor:
    """Per slot, the last slot of the same ``place`` where ``acts`` is set, counted from 1, or 0: int64, (slots,)."""
    slot = torch.where(acts, torch.arange(1, len(place) + 1, device=place.device), 0)
    return torch.zeros(entries, dtype=torch.int64, device=place.device).scatter_reduce_(0, place, slot, "amax")[place]


def _assign(memory: Tensor, place: Tensor, value: Tensor, last: Tensor) -> None:
    """Assign ``value`` of slot ``last - 1`` to each ``place``; where ``last`` is 0, the memory is unchanged.

    All slots of one place write the same value, since index_put_ keeps an arbitrary one of several. A boolean mask
    would synchronise the GPU.
    """
    memory[place] = torch.where(last > 0, value[last - 1], memory[place])


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
    """Assign ``mean * scale`` to the gradients' entries at ``indices``, and update the residual.

    Where ``mean`` is finite, the residual's entry becomes ``quantization_error``, the part of this rank's value that
    was not sent, and the velocity's entry 0. Where it is not finite, only the gradient is assigned, so that all ranks
    see it. Slots are processed in order: of several for one entry, the last one determines the result. Entries in a
    gradient's padding are skipped.

    Without ``quantization_error``, residual and velocity are unchanged: their update is deferred to
    :func:`accumulate_select`.

    With ``block_means``, float32, (blocks,) of the bucket, every entry of a gradient is assigned its block's mean times
    ``scale``, and ``mean * scale`` is added at ``indices``.

    ``grads``: for each segment a dense tensor, in memory order, or an empty one, which is skipped. ``mean``,
    ``quantization_error``: float32, all slots. The other arguments are as in :func:`gather`.
    """
    where = flat_positions(indices, segments, phase)
    scatter_at(grads, residual, velocity, where, segments, mean, quantization_error, scale, block_means)


def scatter_at(
    grads: list[Tensor],
    residual: Tensor,
    velocity: Tensor | None,
    where: Tensor,
    segments: Tensor,
    mean: Tensor,
    quantization_error: Tensor | None,
    scale: float,
    block_means: Tensor | None = None,
) -> None:
    """:func:`scatter` with the slots' positions in the bucket's flat memory: ``where``, int64, (slots,)."""
    if quantization_error is not None:
        last = _last(where, mean.isfinite(), residual.numel())
        _assign(residual, where, quantization_error, last)
        if velocity is not None:
            _assign(velocity, where, torch.zeros_like(quantization_error), last)
    value = mean * scale
    if block_means is not None:
        base = block_means * scale
        value = base[where // BLOCK] + value
    for grad, (first_block, blocks, first_slot, slots) in zip(grads, segments.tolist(), strict=True):
        if grad.numel() == 0:
            continue
        flat = grad.as_strided((grad.numel(),), (1,))
        if block_means is not None:
            flat.copy_(base[first_block : first_block + blocks].repeat_interleave(BLOCK)[: grad.numel()])
        mine = slice(first_slot, first_slot + slots)
        place = where[mine] - first_block * BLOCK
        inside = place < grad.numel()
        place.clamp_(max=grad.numel() - 1)
        _assign(flat, place, value[mine].to(grad.dtype), _last(place, inside, grad.numel()))
