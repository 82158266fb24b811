"""What an exchange leaves to the next gradient: the residual's part of it.

What was sent leaves the residual, and what the wire has lost of it comes back. To do that at once, a cache line has to
be fetched and written back for every entry; but the next gradient goes through all of the residual anyway, and takes
it along (:func:`hvd_compress.ops.accumulate_select`). Whoever looks at the residual earlier has it done before
(:attr:`hvd_compress.bucket.Bucket.residual`).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from . import ops


@dataclass
class Due:
    """One exchange's: of :func:`hvd_compress.ops.put`, the ``lost`` of all slots, and which entries they are.

    ``picks``: uint8, (slots,); ``segments``: the operators' table; ``spans``: every segment's slots. ``mean`` and
    ``lost``: float32, (slots,). Memory that nobody writes to before the next exchange has begun.
    """

    picks: Tensor
    segments: Tensor
    spans: list[slice]
    phase: int
    mean: Tensor
    lost: Tensor
    #: Of each segment, whether it still has to be done.
    waiting: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        self.waiting = [True] * len(self.spans)

    def of(self, position: int) -> tuple[Tensor, Tensor, Tensor, int, int, int] | tuple[()]:
        """The last arguments of accumulate_select for a segment: none if it is done."""
        if not self.waiting[position]:
            return ()
        span = self.spans[position]
        return self.picks, self.mean, self.lost, span.stop - span.start, span.start, self.phase

    def settle(self, residual: Tensor, velocity: Tensor | None) -> None:
        """Does all that is waiting, in the bucket's tensors."""
        mean = without(self.mean, (span for span, waits in zip(self.spans, self.waiting, strict=True) if not waits))
        nowhere = [residual.new_empty(0)] * len(self.spans)
        ops.put(nowhere, residual, velocity, self.picks, self.segments, mean, self.lost, self.phase, 0.0)
        self.waiting = [False] * len(self.spans)


def without(mean: Tensor, spans: Iterable[slice]) -> Tensor:
    """``mean`` for :func:`hvd_compress.ops.put`, not finite in some slots: what these stand for stays as it is."""
    spans = list(spans)
    if spans:
        mean = mean.clone()
        for span in spans:
            mean[span] = math.nan
    return mean
