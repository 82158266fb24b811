"""Error feedback on all entries, and the moments that their scales come from. See :mod:`.blocks` and :mod:`.codes`."""

import torch
from torch import Tensor

from .blocks import BLOCK, usable
from .codes import codebook_decode, moments, summed


def accumulate(
    grads: list[Tensor], starts: list[Tensor], residual: Tensor, pieces: Tensor, edges: Tensor, out: Tensor,
    squares: Tensor | None, invalid: Tensor, scale: float, codes: Tensor | None = None,
    sent_scale: Tensor | None = None, book: Tensor | None = None, kind: Tensor | None = None, bits: int = 0,
) -> None:  # fmt: skip
    """Subtract what was sent from the residual, add a bucket's gradients, and write the moments of the sums.

    Per entry, with ``d = grad``, or ``d = grad - start`` with a start, and 0 in the padding::

        residual <- (residual - decoded codes) + d * scale

    Where ``d * scale`` is not :func:`usable`, it is not added, and ``invalid`` is set to 1. A block's sum of ``d**2``,
    in the order of :func:`moments`, goes to ``squares``.

    ``grads``: as in :func:`accumulate_select`, not written. ``starts``: for each piece an empty tensor, or, if the
    gradient is float32, one of its size, memory order and dtype. ``residual``, ``pieces``, ``invalid``: as there.
    ``edges``, ``out``: as in :func:`moments`. ``squares``: float64, (blocks,), or None. ``codes`` and what follows: as
    in :func:`codebook_decode`, in the same groups; or None.
    """
    if codes is not None and sent_scale is not None and book is not None and kind is not None:
        codebook_decode(codes, -sent_scale, edges, book, kind, residual, bits, True)
    for grad, start, (first_block, blocks, _, _) in zip(grads, starts, pieces.tolist(), strict=True):
        if not (n := grad.numel()):
            continue
        entries, place = grad.as_strided((n,), (1,)), slice(first_block * BLOCK, (first_block + blocks) * BLOCK)
        if start.numel():
            entries = entries - start.as_strided((n,), (1,))
        padded = torch.nn.functional.pad(entries.float(), (0, -n % BLOCK))
        if squares is not None:
            squares[first_block : first_block + blocks] = summed(padded.double().square().view(-1, BLOCK))
        fits = usable(padded * scale)
        residual[place] = torch.where(fits, residual[place] + padded * scale, residual[place])
        if not fits.all():
            invalid.fill_(1)
    moments(residual, edges, out)
