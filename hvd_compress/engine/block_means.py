"""What a block's entries have in common: its mean, which travels in every step beside the few entries that are picked.

An entry waits many steps for its turn, and by then all of a block's entries have gathered the same push. Where inputs
are positive (behind a ReLU), the gradients of a unit's weights have one sign and nearly one size: together they are
one direction, a steep one, and a push along it that comes late, whole and again and again overshoots. Sent at once, for
one value of 256, that direction is trained as without compression, and what waits is what entries have of their own.
"""

from typing import Any

import torch
from torch import Tensor

from .. import ops
from .bucket import Bucket, Segment
from ..reference import BLOCK

#: What a checkpoint must carry.
_KEPT = ("fresh", "velocity", "held")


class BlockMeans:
    """Of one bucket: float32 tensors of (blocks,).

    ``fresh``: what gradients have brought since the last exchange (:func:`hvd_compress.reference.accumulate_select`
    adds it). ``velocity``: as the entries have one. ``held``: what the wire has not carried yet.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.fresh, self.velocity, self.held = torch.zeros(3, bucket.blocks, device=bucket.device).unbind()

    def send(self, out: Tensor, momentum: float, invalid: Tensor) -> None:
        """Writes a step's means to ``out``. One that would not be finite stays as it is, and sets ``invalid``, int32,
        (1,)."""
        ops.means_send(self.fresh, self.held, self.velocity if momentum else None, out, invalid, momentum)

    def arrived(self, mean: Tensor, lost: Tensor) -> None:
        """The averages are there: what is not in them is held. One that is not finite leaves ``held`` as it is."""
        ops.means_keep(mean, lost, self.held)

    def undo(self, sent: Tensor) -> None:
        """Nothing was said after all: not what went out as ``sent``."""
        self.held.copy_(sent)

    def waiting(self, segment: Segment) -> Tensor:
        """What waits of a segment's means, for each of its entries: float32, (blocks * 256,), 0 in the padding."""
        flat = segment.of_blocks(self.held + self.fresh).repeat_interleave(BLOCK)
        flat[segment.numel :] = 0.0
        return flat

    def state(self) -> dict[str, Any]:
        """What a checkpoint must carry, by parameter."""
        kept = {key: getattr(self, key) for key in _KEPT}
        return {s.name: {key: s.of_blocks(kept[key]).clone() for key in _KEPT} for s in self._bucket.segments}

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        for segment in self._bucket.segments:
            for key in _KEPT:
                segment.of_blocks(getattr(self, key)).copy_(state[segment.name][key])
