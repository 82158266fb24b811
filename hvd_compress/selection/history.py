"""What all ranks know of the gradients without a message: the averages they have seen, entry by entry."""

import torch
from torch import Tensor

from ..engine.bucket import Bucket
from ..codecs.scales import Moments
from .base import Unled

# Under this, a mean square counts as zero: it only keeps the scores of what is all zero apart from nothing.
_TINY = 1e-12


class History:
    """The average gradient of every entry, per step and smoothed, and when it was last sent: equal on all ranks, kept
    in the bucket's state, so that checkpoints carry it."""

    def __init__(self, bucket: Bucket, smoothing: float) -> None:
        if not 0.0 <= smoothing < 1.0:
            raise ValueError(f"smoothing must lie in [0, 1), got {smoothing}")
        self._smoothing = smoothing
        self.bucket = bucket
        self._before: tuple[Unled, Tensor, Tensor] | None = None
        bucket.add_state("smoothed")
        bucket.add_state("last_sent")
        self.restart()

    def restart(self) -> None:
        """Nothing is known."""
        self._before = None
        self.smoothed.zero_()
        self.last_sent.fill_(-1.0)

    def undo(self) -> None:
        """What arrived last was never applied, and will come again."""
        if self._before is not None:
            selection, smoothed, last = self._before
            selection.write(self.smoothed, smoothed)
            selection.write(self.last_sent, last)
            self._before = None

    @property
    def smoothed(self) -> Tensor:
        return self.bucket.state["smoothed"]

    @property
    def last_sent(self) -> Tensor:
        return self.bucket.state["last_sent"]

    def learn(self, selection: Unled, mean: Tensor, step: int, guessed: Tensor | float = 0.0) -> None:
        """``mean`` arrived for the selection's entries, unless it is not finite: the gradient of all steps since they
        were last sent, but for what was ``guessed`` of it in each."""
        arrived = mean[:1].isfinite()
        smoothed, last = selection.read(self.smoothed), selection.read(self.last_sent)
        self._before = selection, smoothed, last
        # At least a step: one that failed and is taken again has the number it had.
        rate = mean / (step - last).clamp(min=1.0) + guessed
        new = smoothed * self._smoothing + rate * (1.0 - self._smoothing)
        selection.write(self.smoothed, torch.where(arrived, new, smoothed))
        selection.write(self.last_sent, torch.where(arrived, float(step), last))


def root_mean_squares(bucket: Bucket, weights: list[Tensor], other: Tensor) -> tuple[Tensor, Tensor]:
    """Of each segment's weights, and of its part of the bucket-wide ``other``: float32, (segments,), never 0, and the
    same bits on all ranks (a torch.mean() is not, on different processors)."""
    parts = []
    for segment, weight in zip(bucket.segments, weights, strict=True):
        both = torch.cat([weight, segment.of(other)[: segment.numel]])
        # Counted there: a GPU would be waited for, to copy them from here.
        edges = torch.arange(3, device=bucket.device) * segment.numel
        parts.append(Moments(both, edges).rms)
    first, second = torch.stack(parts).float().unbind(1)
    return first + _TINY, second + _TINY


def flat_weights(bucket: Bucket) -> list[Tensor]:
    """Each segment's weights in memory order: float32, (entries,)."""
    return [s.parameter.detach().as_strided((s.numel,), (1,)).float() for s in bucket.segments]
