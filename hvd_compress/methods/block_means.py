"""The mean of each block of 256 gradients, sent in every step beside the selected entries.

A residual accumulates a common offset of a block (behind a ReLU the gradients of a unit's weights have one sign and
similar size), which would overshoot when applied late. One value per 256 entries trains that direction without delay;
the residual keeps the deviations from the mean.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from .. import ops
from ..engine.bucket import Bucket, Piece
from ..engine.state import TensorLeaf, Tree
from ..engine.work import Part
from ..reference import BLOCK
from ..selection.base import NOT_SENT


class BlockMeans(Part):
    """The block means of one bucket: float32 tensors of (blocks,), or of (0,) without block means.

    ``fresh``: the means of the gradients since the last exchange (added by ``accumulate_select``). ``velocity``: of
    momentum correction. ``unsent``: the residual of the means. ``sizes``: the blocks of each piece.
    """

    def __init__(self, bucket: Bucket, sent: bool) -> None:
        self._bucket, self.sizes = bucket, [piece.blocks for piece in bucket.pieces if sent]
        memory = torch.zeros(3, sum(self.sizes), dtype=torch.float32, device=bucket.device)
        self.fresh, self.velocity, self.unsent = memory.unbind()

    def load(
        self, out: Tensor, momentum: float, without: Iterable[Piece], invalid: Tensor, idle: Tensor | None
    ) -> None:
        """Writes this step's means to ``out``. A mean that would not be finite is left out and sets ``invalid``, int32,
        (1,). ``without``: the pieces that have no momentum. ``idle``: the blocks that keep their velocity, bool."""
        if self.sizes:
            for piece in without:
                piece.of_blocks(self.velocity).zero_()
            kept = 0.0 if idle is None else self.velocity * idle
            self.velocity.sub_(kept)
            ops.block_means_send(self.fresh, self.unsent, self.velocity if momentum else None, out, invalid, momentum)
            self.velocity.add_(kept)

    def receive(self, mean: Tensor, error: Tensor) -> Tensor | None:
        """Keeps the quantization ``error`` in ``unsent`` where the averaged ``mean`` is finite. Returns ``mean``
        without pieces for which no gradient arrived; None without block means."""
        if not self.sizes:
            return None
        for piece in self._bucket.missing():
            piece.of_blocks(mean).fill_(NOT_SENT)
        ops.block_means_keep(mean, error, self.unsent)
        return mean

    def added(self, piece: Piece, entries: Tensor, per_block: Tensor) -> Tensor:
        """``entries`` of a piece plus one of the tensors above: float32, in its shape."""
        if not self.sizes:
            return entries
        return entries + piece.reshaped(piece.of_blocks(per_block).repeat_interleave(BLOCK))

    def clear(self, piece: Piece) -> None:
        """Zeros the unsent means of a piece."""
        piece.of_blocks(self.unsent).zero_()
        piece.of_blocks(self.fresh).zero_()

    def state(self) -> Tree:
        if not self.sizes:
            return {}
        tensors = {key: getattr(self, key) for key in ("fresh", "velocity", "unsent")}
        return {
            piece.name: {key: TensorLeaf(piece.of_blocks(t), per_rank=True) for key, t in tensors.items()}
            for piece in self._bucket.pieces
        }
