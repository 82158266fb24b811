"""What a block's entries have in common: its mean, which travels in every step beside the few entries that are picked.

An entry waits many steps for its turn, and by then all of a block's entries have gathered the same push. Where inputs
are positive (behind a ReLU), the gradients of a unit's weights have one sign and nearly one size: together they are
one direction, a steep one, and a push along it that comes late, whole and again and again overshoots. Sent at once, for
one value of 256, that direction is trained as without compression, and what waits is what entries have of their own.
"""

from typing import Any

import torch
from torch import Tensor

from .bucket import Bucket, Segment
from .reference import BLOCK

#: What a checkpoint must carry.
_KEPT = ("fresh", "velocity", "held")


class BlockMeans:
    """Of one bucket: float32 tensors of (blocks,).

    ``fresh``: what gradients have brought since the last exchange (:func:`hvd_compress.reference.accumulate_select`
    adds it). ``velocity``: as the entries have one. ``held``: what the wire has not carried yet. ``sent``: what it was
    given last.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.fresh, self.velocity, self.held, self.sent = torch.zeros(4, bucket.blocks, device=bucket.device).unbind()

    def beside(self, values: Tensor, momentum: float, invalid: Tensor) -> Tensor:
        """The values of a step: the picked entries', then all means'. One that would not be finite stays as it is, and
        sets ``invalid``, int32, (1,)."""
        step = self.velocity * momentum + self.fresh if momentum else self.fresh
        total = self.held + step
        finite = total.isfinite()
        torch.where(finite, total, self.held, out=self.held)
        if momentum:
            torch.where(finite, step, self.velocity, out=self.velocity)
        invalid |= (~finite.all()).to(torch.int32)
        self.fresh.zero_()
        self.sent.copy_(self.held)
        return torch.cat([values, self.held])

    def arrived(self, mean: Tensor, lost: Tensor) -> None:
        """The averages are there: what is not in them is held. One that is not finite leaves ``held`` as it is."""
        torch.where(mean.isfinite(), lost, self.held, out=self.held)

    def undo(self) -> None:
        """Nothing was said after all."""
        self.held.copy_(self.sent)

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
