"""The mean of each block of 256 gradients, sent in every step beside the selected entries.

Until they are sent, a block's entries accumulate a common offset (behind a ReLU the gradients of a unit's weights have
one sign and similar size), which would overshoot when applied late. One value per 256 entries trains that direction
without delay; the residual keeps the deviations from the mean.
"""

import torch
from torch import Tensor

from .. import ops
from ..engine.bucket import Bucket, Piece
from ..engine.state import TensorLeaf, Tree
from ..engine.work import Part
from ..reference import BLOCK

_SAVED = ("fresh", "velocity", "unsent")


class BlockMeans(Part):
    """The block means of one bucket: float32 tensors of (blocks,).

    ``fresh``: the means of the gradients since the last exchange (added by ``accumulate_select``). ``velocity``: for
    momentum correction. ``unsent``: the residual of the means.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        memory = torch.zeros(3, bucket.blocks, dtype=torch.float32, device=bucket.device)
        self.fresh, self.velocity, self.unsent = memory.unbind()

    def load(self, out: Tensor, momentum: float, invalid: Tensor) -> None:
        """Writes this step's means to ``out``. A mean that would not be finite is left out and sets ``invalid``, int32,
        (1,)."""
        ops.block_means_send(self.fresh, self.unsent, self.velocity if momentum else None, out, invalid, momentum)

    def keep_error(self, mean: Tensor, error: Tensor) -> None:
        """Keeps the quantization ``error`` in ``unsent`` after the exchange, where the averaged ``mean`` is finite."""
        ops.block_means_keep(mean, error, self.unsent)

    def put_back(self, sent: Tensor) -> None:
        """Takes the exchange of ``sent`` back."""
        self.unsent.copy_(sent)

    def spread(self, piece: Piece, per_block: Tensor) -> Tensor:
        """A tensor of the bucket's blocks, for each entry of a piece, in its shape: float32."""
        return piece.reshaped(piece.of_blocks(per_block).repeat_interleave(BLOCK))

    def state(self) -> Tree:
        tensors = {key: getattr(self, key) for key in _SAVED}
        return {
            piece.name: {key: TensorLeaf(piece.of_blocks(t), per_rank=True) for key, t in tensors.items()}
            for piece in self._bucket.pieces
        }
