"""The averages that all ranks have received: information about each entry without communication."""

import torch
from torch import Tensor

from ..codecs.scales import Moments
from ..engine.bucket import Bucket
from ..engine.state import Tree
from ..engine.work import Part, Step
from ..selection.pickers import Picker

# Keeps root mean squares of all-zero tensors above 0.
_TINY = 1e-12


class GradientHistory(Part):
    """The smoothed average gradient per step of every entry, ``smoothed``, and the step of its last transmission,
    ``last_sent``: bucket-wide, and the same on all ranks. ``smoothing``: the weight of the past, in [0, 1)."""

    def __init__(self, bucket: Bucket, smoothing: float) -> None:
        self._smoothing, self._bucket = smoothing, bucket
        self._before: tuple[Picker, Tensor, Tensor] | None = None
        self.smoothed, self.last_sent = bucket.zeros(), bucket.zeros()
        self.restart()

    def begin(self, step: Step) -> None:
        self._before = None

    def restart(self) -> None:
        self._before = None
        self.smoothed.zero_()
        self.last_sent.fill_(-1.0)

    def undo(self) -> None:
        if self._before is not None:
            picker, smoothed, last = self._before
            picker.write(self.smoothed, smoothed)
            picker.write(self.last_sent, last)
            self._before = None

    def state(self) -> Tree:
        saved = self._bucket.saved
        return {"smoothed": saved(self.smoothed), "last_sent": saved(self.last_sent, low=-1.0)}

    def update(self, picker: Picker, mean: Tensor, step: int) -> None:
        """Updates the picked entries by ``mean``, their gradients' sum since they were last sent, if it is finite."""
        arrived = mean[:1].isfinite()
        smoothed, last = picker.read(self.smoothed), picker.read(self.last_sent)
        self._before = picker, smoothed, last
        # After a failed step the number is unchanged, and the difference may be 0.
        rate = mean / (step - last).clamp(min=1.0)
        new = smoothed * self._smoothing + rate * (1.0 - self._smoothing)
        picker.write(self.smoothed, torch.where(arrived, new, smoothed))
        picker.write(self.last_sent, torch.where(arrived, float(step), last))


def root_mean_squares(bucket: Bucket, weights: list[Tensor], other: Tensor) -> tuple[Tensor, Tensor]:
    """The root mean squares of each piece's ``weights`` and of its part of the bucket-wide ``other``: float32,
    (pieces,), above 0 and finite, the same bits on all ranks (which torch.mean() does not guarantee)."""
    parts = []
    for piece, weight in zip(bucket.pieces, weights, strict=True):
        both = torch.cat([weight, piece.of(other)[: piece.numel]])
        # Computed on the device: a copy from the host would synchronise a GPU.
        edges = torch.arange(3, dtype=torch.int64, device=bucket.device) * piece.numel
        parts.append(Moments(both, edges).rms)
    first, second = torch.stack(parts).float().nan_to_num(nan=0.0, posinf=0.0).unbind(1)
    return first + _TINY, second + _TINY


def flat_weights(bucket: Bucket) -> list[Tensor]:
    """Each piece's weights in memory order: float32, (entries,)."""
    return [piece.flat_weight().float() for piece in bucket.pieces]
