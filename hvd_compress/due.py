"""What an exchange leaves to the next gradient: the residual's part of it.

What was sent leaves the residual, and what the wire has lost of it comes back. To do that at once, a cache line has to
be fetched and written back for every entry; but the next gradient goes through all of the residual anyway, and takes
it along (:func:`hvd_compress.ops.accumulate_select`). Whoever looks earlier has it done before
(:meth:`hvd_compress.bucket.Bucket.catch_up`).
"""

import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from . import ops


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
    #: Held while it is done: a thread that only wants to know a residual must not do it once more. (Not held while a
    #: rank waits for others.)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self._waiting = [True] * len(self.spans)

    @property
    def waits(self) -> bool:
        """Whether something is left to do."""
        return any(self._waiting)

    def of(self, position: int) -> tuple[Tensor, Tensor, Tensor, int, int, int] | tuple[()]:
        """The last arguments of accumulate_select for a segment, which then is :meth:`done`: none if it was before."""
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


def without(mean: Tensor, spans: Iterable[slice]) -> Tensor:
    """``mean`` for :func:`hvd_compress.ops.put`, not finite in some slots: what these stand for stays as it is."""
    spans = list(spans)
    if spans:
        mean = mean.clone()
        for span in spans:
            mean[span] = math.nan
    return mean
