"""What an exchange leaves to the next gradient: the residual's part of it.

What was sent leaves the residual, and what the wire has lost of it comes back. To do that at once, a cache line has to
be fetched and written back for every entry; but the next gradient goes through all of the residual anyway, and takes
it along (:func:`hvd_compress.ops.accumulate_select`). Whoever needs the residual earlier has it done before
(:attr:`hvd_compress.bucket.Bucket.residual`), or only looks (:meth:`hvd_compress.bucket.Bucket.peek`).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..reference import BLOCK


@dataclass
class Due:
    """What :func:`hvd_compress.ops.put` does to residual and velocity, of one exchange of all segments.

    ``picks``: uint8, (slots,); ``segments``: the operators' table; ``spans``: every segment's slots. ``mean`` and
    ``lost``: float32, (slots,). Memory that nobody writes to before the next exchange.
    """

    picks: Tensor
    segments: Tensor
    spans: list[slice]
    phase: int
    mean: Tensor
    lost: Tensor

    def __post_init__(self) -> None:
        self._waiting = [True] * len(self.spans)

    @property
    def waits(self) -> bool:
        """Whether something is left to do."""
        return any(self._waiting)

    def of(self, position: int) -> tuple[Tensor, Tensor, Tensor, int, int, int] | tuple[()]:
        """The last arguments of accumulate_select for a segment, which is :meth:`done` after it, or none."""
        if not self._waiting[position]:
            return ()
        span = self.spans[position]
        return self.picks, self.mean, self.lost, span.stop - span.start, span.start, self.phase

    def done(self, position: int) -> None:
        """Of a segment."""
        self._waiting[position] = False

    def finish(self, residual: Tensor, velocity: Tensor | None) -> None:
        """Does all that waits, in the bucket's tensors."""
        mean = without(self.mean, (span for span, waits in zip(self.spans, self._waiting, strict=True) if not waits))
        nowhere = [residual.new_empty(0)] * len(self.spans)
        ops.put(nowhere, residual, velocity, self.picks, self.segments, mean, self.lost, self.phase, 0.0)
        self._waiting = [False] * len(self.spans)

    def seen(self, position: int, residual: Tensor) -> Tensor:
        """A segment's residual as it will be: the tensor itself, or a copy of which its part is done."""
        if not self._waiting[position]:
            return residual
        residual, span = residual.clone(), self.spans[position]
        row = torch.tensor([[0, residual.numel() // BLOCK, 0, span.stop - span.start]], device=residual.device)
        nowhere, mean, lost = [residual.new_empty(0)], self.mean[span], self.lost[span]
        ops.put(nowhere, residual, None, self.picks[span], row, mean, lost, self.phase, 0.0)
        return residual


def without(mean: Tensor, spans: Iterable[slice]) -> Tensor:
    """``mean`` for :func:`hvd_compress.ops.put`, not finite in some slots: what these stand for stays as it is."""
    spans = list(spans)
    if spans:
        mean = mean.clone()
        for span in spans:
            mean[span] = math.nan
    return mean
