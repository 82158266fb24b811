"""Finds pieces for which no rank has a gradient, such as frozen layers."""

import torch
from torch import Tensor

from ..engine.bucket import Bucket
from ..engine.work import Part, Step
from ..reference import BLOCK
from .pickers import Picker


class Idle(Part):
    """The idle pieces of a bucket in the current step: no rank has a gradient for them.

    ``silences``: whether idle pieces receive 0 and keep their residuals; a method that sends signs would apply even a
    tiny residual for ever. ``finds``: whether idle pieces are found, also with momentum: they keep their velocities.
    Otherwise none is idle. ``touched``: int32, (pieces,), whether this rank's gradient has an entry other than zero.
    """

    def __init__(self, bucket: Bucket, silences: bool) -> None:
        self._bucket, self.finds, self._silences = bucket, silences, silences
        self.touched = torch.zeros(len(bucket.pieces), dtype=torch.int32, device=bucket.device)
        self._pieces: Tensor | None = None
        # Made once: creating it in each step would synchronise a GPU.
        counts = [piece.blocks for piece in bucket.pieces]
        self._block_counts = torch.tensor(counts, dtype=torch.int64, device=bucket.device)

    def begin(self, step: Step) -> None:
        self.touched.zero_()

    def find(self) -> None:
        self.finds = True

    def found(self, touched: Tensor) -> None:
        """Called by the decider. ``touched``: whether any rank has a gradient for a piece, bool, (pieces,)."""
        idle = ~touched
        # Free on the CPU; a GPU would be synchronised.
        self._pieces = idle if idle.is_cuda or bool(idle.any()) else None

    def keep(self, picker: Picker, mean: Tensor, error: Tensor, sent: Tensor) -> tuple[Tensor, Tensor]:
        """The ``mean`` with 0 in idle pieces, and the quantization ``error`` with the ``sent`` values there, so that
        they stay in the residual. All float32, (slots,)."""
        if self._pieces is None or not self._silences:
            return mean, error
        idle = self._pieces.repeat_interleave(picker.slot_counts, output_size=picker.total)
        return mean.masked_fill(idle, 0.0), torch.where(idle, sent, error)

    def silence(self, mean: Tensor) -> Tensor:
        """Returns a bucket-wide average, float32, (blocks * 256,), with 0 in idle pieces."""
        idle = self.blocks if self._silences else None
        return mean if idle is None else mean.view(-1, BLOCK).masked_fill(idle[:, None], 0.0).view(-1)

    @property
    def blocks(self) -> Tensor | None:
        """Whether each block of the bucket belongs to an idle piece, bool, (blocks,); None if no piece is idle."""
        if self._pieces is None:
            return None
        return self._pieces.repeat_interleave(self._block_counts, output_size=self._bucket.blocks)
