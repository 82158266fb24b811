"""Gradients in, picks out, values taken and scatter back: the operators on blocks of 256 entries.

Vocabulary
----------
block
    256 consecutive entries of a parameter in memory order (the last one may be partly padding).
segment
    one parameter's blocks inside a bucket's flat residual.
slot
    one entry that will be sent. A segment of ``blocks`` blocks holds ``slots`` slots; block ``b`` holds the
    slots from ``slot_start(b)`` to ``slot_start(b + 1)``, so that any number of slots spreads evenly, and
    ``phase`` rotates the remainder from step to step.
leader
    the rank whose residual decides which entry a slot carries. Slots are dealt to ranks in runs of ``run``;
    a rank's *position* in that round differs from step to step.
index
    where in its block a slot's entry lies: one byte.
"""

from typing import TypeVar

import torch
from torch import Tensor

Word = TypeVar("Word", int, Tensor)

BLOCK = 256
_MASK = 0xFFFFFFFF


def mix(value: Word, key: int) -> Word:
    """A 32-bit hash of ``value`` under ``key``: two multiply-xorshift rounds. Below 2**32, as int64 if a tensor."""
    value = (value * 0x9E3779B1 + key) & _MASK
    value = ((value ^ (value >> 16)) * 0x21F0AAAD) & _MASK
    value = ((value ^ (value >> 15)) * 0x735A2D97) & _MASK
    return value ^ (value >> 15)


def exponential(bits: Tensor) -> Tensor:
    """Draws from an exponential distribution (in units of ln 2) for 32 random ``bits`` each, float32, > 0.

    ``-log2(u)`` with the mantissa's logarithm as a parabola (error under 0.009): the same few exact steps
    on every back end, so that a draw does not depend on whose ``log`` computed it.
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
    """How many of the bucket's slots before ``slot`` belong to the rank at ``position``."""
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
    """Take a gradient into the residual and write the indices of the entries that this rank, as leader, picks.

    Per entry, with ``g = grad * scale``, and with ``block_means`` less the mean of its block, which is added there (0 for
    a block whose sum is not finite)::

        velocity <- momentum * velocity + g      (only with a velocity; else velocity stands for g)
        residual <- residual + velocity
        score     = |residual| / (|weight| + floor)      (without a weight: |residual|)

    and ``grad`` is zeroed, but not with ``block_means``: then :func:`scatter` writes all of it. An entry whose new residual
    would not be finite keeps its residual and velocity, and sets ``invalid`` to 1. Then :func:`select` by that score,
    0 in the padding.

    Before all that, with ``deferred_indices``, comes what :func:`scatter` has not done of the last exchange, by these entries'
    slots of it: ``deferred_slots`` from ``deferred_first_slot`` on, of that exchange's phase.

    ``grad``, ``weight``: n entries, dense, of one memory order, float32, float16 or bfloat16.
    ``residual``, ``velocity``: float32, (blocks * 256,). ``floor``: float32, (1,), >= 0.
    ``indices``: uint8, this rank's whole plane.
    ``invalid``: int32, (1,). ``block_means``: float32, (blocks,). ``slots`` 0 accumulates only. ``deferred_indices``: uint8, and
    ``deferred_mean``, ``deferred_error``: float32, all slots of the exchange.
    """
    if deferred_indices is not None and deferred_mean is not None and deferred_error is not None:
        mine = slice(deferred_first_slot, deferred_first_slot + deferred_slots)
        row = torch.tensor([[0, residual.numel() // BLOCK, 0, deferred_slots]])
        nowhere, sent, quantization_error = [residual.new_empty(0)], deferred_mean[mine], deferred_error[mine]
        scatter(nowhere, residual, velocity, deferred_indices[mine], row, sent, quantization_error, deferred_phase, 0.0)
    n = grad.numel()
    flat = grad.as_strided((n,), (1,))
    step = flat.float() * scale
    if block_means is not None:
        mean = mean_of_blocks(step, len(block_means))
        block_means += mean
        step -= mean.repeat_interleave(BLOCK)[:n]
    old = residual[:n]
    if velocity is not None:
        step = velocity[:n] * momentum + step
    new = old + step
    finite = new.isfinite()
    invalid |= (~finite.all()).to(torch.int32)
    if velocity is not None:
        velocity[:n] = torch.where(finite, step, velocity[:n])
    residual[:n] = torch.where(finite, new, old)
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
    """The mean of every block's entries, the padding left out: float32, (blocks,); 0 where it is not finite.

    Halves are added to each other, down to one number: an order that any width of vectors and warps can follow.
    """
    sums = torch.nn.functional.pad(entries, (0, blocks * BLOCK - entries.numel())).view(blocks, BLOCK)
    while sums.shape[1] > 1:
        lower, upper = sums.chunk(2, dim=1)
        sums = lower + upper
    inside = (entries.numel() - torch.arange(blocks, device=entries.device) * BLOCK).clamp(1, BLOCK)
    return (sums[:, 0] / inside).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


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
    """Write the indices of the entries that this rank, as leader, picks by ``score`` (>= 0; a NaN counts as 0).

    In every block in which it leads ``c > 0`` slots, the ``c`` largest scores (the lower index first among equals)
    are written in ascending order of index. In an explored block (a share ``explore / 2**32`` of them) each score is
    first divided by a draw from an exponential distribution, which makes the choice a sample without replacement in
    proportion to the score.

    ``score``: float32, (blocks * 256,). ``indices``: uint8, this rank's whole plane.
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
    place = slots_before(first_slot + slot_start(block, slots, blocks, phase), run, ranks, position)
    count = place.diff()
    ranking = score.sort(dim=1, descending=True, stable=True).indices
    chosen = torch.zeros_like(score, dtype=torch.bool)
    chosen.scatter_(1, ranking, torch.arange(BLOCK, device=device) < count[:, None])
    indices[place[0] : place[-1]] = chosen.nonzero()[:, 1].to(torch.uint8)


def flat_positions(indices: Tensor, segments: Tensor, phase: int) -> Tensor:
    """Where every slot's entry lies in the bucket's flat memory: int64, (slots,). The table of segments may lie on the
    host, which reads it."""
    parts = [indices.new_empty(0, dtype=torch.int64)]
    for first_block, blocks, first_slot, slots in segments.tolist():
        edges = slot_start(torch.arange(blocks + 1, device=indices.device), slots, blocks, phase)
        block = torch.arange(blocks, device=indices.device).repeat_interleave(edges.diff(), output_size=slots)
        parts.append((first_block + block) * BLOCK + indices[first_slot : first_slot + slots].long())
    return torch.cat(parts)


def gather(residual: Tensor, indices: Tensor, segments: Tensor, values: Tensor, phase: int) -> None:
    """Read the entries at ``indices`` into ``values``; the residual stays as it is.

    ``residual``: float32, the whole bucket. ``indices``: uint8, all slots, in slot order.
    ``segments``: int64, (parameters, 4): first block, blocks, first slot, slots; ascending.
    ``values``: float32, all slots.
    """
    values.copy_(residual[flat_positions(indices, segments, phase)])


def _last(place: Tensor, acts: Tensor, entries: int) -> Tensor:
    """For every slot, the last of its ``place`` that ``acts``, counted from 1, or 0: int64, (slots,)."""
    slot = torch.where(acts, torch.arange(1, len(place) + 1, device=place.device), 0)
    return torch.zeros(entries, dtype=torch.int64, device=place.device).scatter_reduce_(0, place, slot, "amax")[place]


def _assign(memory: Tensor, place: Tensor, value: Tensor, last: Tensor) -> None:
    """Of the slots for one place, the last has the last word; where none acts, all stays as it is.

    They all write what that one says: index_put_ would keep an arbitrary one of several values, and to leave slots out
    by a mask, a GPU would be waited for.
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
    """What the ranks agreed on arrives: the gradients' entries at ``indices`` become ``mean * scale``.

    Where the mean is finite, the residual's entry becomes ``quantization_error``, what the wire did not carry of this rank's value,
    and the velocity's 0. Where it is not, the gradient gets it all the same (every rank then sees it, as with dense
    training), and nothing leaves the residual. The slots act one after the other: of two for one entry, the later has
    the last word. Entries in a gradient's padding are passed over.

    Without ``quantization_error``, residual and velocity stay as they are: their part is due (:func:`accumulate_select`).

    With ``block_means``, float32, (blocks,) of the bucket, every entry of a gradient becomes its block's, times
    ``scale``, and those at ``indices`` that plus ``mean * scale``.

    ``grads``: a dense tensor a segment, in memory order, or an empty one to skip it. ``mean``, ``quantization_error``: float32, all
    slots. The rest as in :func:`gather`.
    """
    scatter_at(
        grads,
        residual,
        velocity,
        flat_positions(indices, segments, phase),
        segments,
        mean,
        quantization_error,
        scale,
        block_means,
    )


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
    """:func:`scatter` with the slots' places given: ``where``, int64, flat_positions in the bucket's flat memory."""
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
