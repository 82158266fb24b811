"""What all ranks know of each entry without communication: the averages that they have received."""

import torch
from torch import Tensor

from ..codecs.scales import Moments
from ..engine.bucket import Bucket
from .shared import SharedSelection

# Keeps root mean squares of all-zero tensors above 0.
_TINY = 1e-12


class GradientHistory:
    """The smoothed average gradient per step of every entry, and the step in which it was last sent.

    Equal on all ranks; in the bucket's state (``smoothed``, ``last_sent``), so that checkpoints contain it.
    ``smoothing``: the weight of the past, in [0, 1).
    """

    def __init__(self, bucket: Bucket, smoothing: float) -> None:
        if not 0.0 <= smoothing < 1.0:
            raise ValueError(f"smoothing must lie in [0, 1), got {smoothing}")
        self._smoothing, self._bucket = smoothing, bucket
        self._before: tuple[SharedSelection, Tensor, Tensor] | None = None
        bucket.add_state("smoothed")
        bucket.add_state("last_sent", low=-1.0)
        self.restart()

    @property
    def smoothed(self) -> Tensor:
        return self._bucket.state["smoothed"]

    @property
    def last_sent(self) -> Tensor:
        return self._bucket.state["last_sent"]

    def restart(self) -> None:
        """Forgets everything: new ranks know nothing."""
        self._before = None
        self.smoothed.zero_()
        self.last_sent.fill_(-1.0)

    def undo(self) -> None:
        """Takes the last :meth:`update` back."""
        if self._before is not None:
            selection, smoothed, last = self._before
            selection.write(self.smoothed, smoothed)
            selection.write(self.last_sent, last)
            self._before = None

    def update(self, selection: SharedSelection, mean: Tensor, step: int, predicted: Tensor | float = 0.0) -> None:
        """``mean`` was received for the selected entries: the sum of the gradients of all steps since they were last
        sent, minus what was ``predicted`` of it in each of these steps. Ignored if it is not finite."""
        arrived = mean[:1].isfinite()
        smoothed, last = selection.read(self.smoothed), selection.read(self.last_sent)
        self._before = selection, smoothed, last
        # After a failed step the number is unchanged, and the difference may be 0.
        rate = mean / (step - last).clamp(min=1.0) + predicted
        new = smoothed * self._smoothing + rate * (1.0 - self._smoothing)
        selection.write(self.smoothed, torch.where(arrived, new, smoothed))
        selection.write(self.last_sent, torch.where(arrived, float(step), last))


def root_mean_squares(bucket: Bucket, weights: list[Tensor], other: Tensor) -> tuple[Tensor, Tensor]:
    """The root mean squares of each segment's ``weights`` and of its part of the bucket-wide ``other``: float32,
    (segments,), above 0 and finite, the same bits on all ranks (which torch.mean() does not guarantee)."""
    parts = []
    for segment, weight in zip(bucket.segments, weights, strict=True):
        both = torch.cat([weight, segment.of(other)[: segment.numel]])
        # Computed on the device: a copy from the host would synchronise a GPU.
        edges = torch.arange(3, dtype=torch.int64, device=bucket.device) * segment.numel
        parts.append(Moments(both, edges).rms)
    first, second = torch.stack(parts).float().nan_to_num(nan=0.0, posinf=0.0).unbind(1)
    return first + _TINY, second + _TINY


def flat_weights(bucket: Bucket) -> list[Tensor]:
    """Each segment's weights in memory order: float32, (entries,)."""
    return [segment.flat_weight().float() for segment in bucket.segments]
