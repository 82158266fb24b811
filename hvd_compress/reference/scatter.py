"""Entries at given indices: gather and scatter. The vocabulary is that of :mod:`.blocks`."""

import torch
from torch import Tensor

from .blocks import BLOCK, slot_start
from .hadamard import hadamard


def flat_positions(indices: Tensor, pieces: Tensor, phase: int) -> Tensor:
    """The position of each slot's entry in the bucket: int64, (slots,). ``pieces`` is read on the host."""
    parts = [indices.new_empty(0, dtype=torch.int64)]
    for first_block, blocks, first_slot, slots in pieces.tolist():
        block = torch.arange(blocks + 1, dtype=torch.int64, device=indices.device)
        edges = slot_start(block, slots, blocks, phase)
        block = block[:-1].repeat_interleave(edges.diff(), output_size=slots)
        parts.append((first_block + block) * BLOCK + indices[first_slot : first_slot + slots].long())
    return torch.cat(parts)


def gather(residual: Tensor, indices: Tensor, pieces: Tensor, values: Tensor, phase: int) -> None:
    """Copy the entries at ``indices`` to ``values``.

    ``residual``: float32, the whole bucket. ``indices``: uint8, all slots, in slot order.
    ``pieces``: int64, (pieces, 4): first block, blocks, first slot, slots; ascending.
    ``values``: float32, all slots.
    """
    values.copy_(residual[flat_positions(indices, pieces, phase)])


def _last(place: Tensor, acts: Tensor, entries: int) -> Tensor:
    """Per slot, the last slot of the same ``place`` where ``acts`` is set, counted from 1, or 0: int64, (slots,)."""
    slot = torch.arange(1, len(place) + 1, dtype=torch.int64, device=place.device)
    slot = torch.where(acts, slot, 0)
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
    pieces: Tensor,
    mean: Tensor,
    quantization_error: Tensor,
    phase: int,
    scale: float,
    block_means: Tensor | None = None,
    transform: bool = False,
    sign: bool = False,
) -> None:
    """Assign ``mean * scale`` to the gradients' entries at ``indices``, and update the residual.

    Where ``mean`` is finite, the residual's entry becomes ``quantization_error``, the part of this rank's value that
    was not sent, and the velocity's entry 0. Where it is not finite, only the gradient is assigned, so that all ranks
    see it. Slots are processed in order: of several for one entry, the last one determines the result. Entries in a
    gradient's padding are skipped.

    With ``block_means``, float32, (blocks,) of the bucket, every entry of a gradient is assigned its block's mean times
    ``scale``, and ``mean * scale`` is added at ``indices``.

    With ``transform``, ``mean`` is of coefficients: every entry of a gradient is assigned the :func:`hadamard`
    transform of its block's coefficients, which are 0 except at ``indices``, times ``scale``. With ``sign``, the
    transform's result is first replaced by 1 where it is above 0 and by -1 where it is below.

    ``grads``: for each piece a dense tensor, in memory order, or an empty one, which is skipped. ``mean``,
    ``quantization_error``: float32, all slots. The other arguments are as in :func:`gather`. ``transform``
    goes without ``block_means``, ``sign`` only with ``transform``.
    """
    where = flat_positions(indices, pieces, phase)
    if not transform:
        scatter_at(grads, residual, velocity, where, pieces, mean, quantization_error, scale, block_means)
        return
    skipped = [residual.new_empty(0)] * len(grads)
    scatter_at(skipped, residual, velocity, where, pieces, mean, quantization_error, scale)
    coefficients = torch.zeros_like(residual)
    _assign(coefficients, where, mean, _last(where, torch.ones_like(where, dtype=torch.bool), residual.numel()))
    hadamard(coefficients)
    if sign:
        coefficients = torch.where(coefficients > 0, 1.0, torch.where(coefficients < 0, -1.0, coefficients))
    coefficients *= scale
    for grad, first_block in zip(grads, pieces[:, 0].tolist(), strict=True):
        begin = first_block * BLOCK
        grad.as_strided((grad.numel(),), (1,)).copy_(coefficients[begin : begin + grad.numel()])


def scatter_at(
    grads: list[Tensor],
    residual: Tensor,
    velocity: Tensor | None,
    where: Tensor,
    pieces: Tensor,
    mean: Tensor,
    quantization_error: Tensor,
    scale: float,
    block_means: Tensor | None = None,
) -> None:
    """:func:`scatter` with the slots' positions in the bucket's flat memory: ``where``, int64, (slots,)."""
    last = _last(where, mean.isfinite(), residual.numel())
    _assign(residual, where, quantization_error, last)
    if velocity is not None:
        _assign(velocity, where, torch.zeros_like(quantization_error), last)
    value = mean * scale
    if block_means is not None:
        base = block_means * scale
        value = base[where // BLOCK] + value
    for grad, (first_block, blocks, first_slot, slots) in zip(grads, pieces.tolist(), strict=True):
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
