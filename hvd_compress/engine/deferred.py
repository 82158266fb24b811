"""The part of an exchange that is deferred to the next step: updating the residual.

Entries that were sent leave the residual, and their quantization errors enter it. Done at once, this costs a cache line
per entry; :func:`hvd_compress.ops.accumulate_select` does it while the next gradient passes through the residual. Code
that needs the residual earlier applies the update first (``Bucket.residual``) or previews it (``Bucket.residual_of``).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..reference import BLOCK

#: accumulate_select's ``deferred_indices``, ``deferred_mean``, ``deferred_error``, ``deferred_slots``,
#: ``deferred_first_slot``, ``deferred_phase``.
Arguments = tuple[Tensor | None, Tensor | None, Tensor | None, int, int, int]
NOT_DEFERRED: Arguments = (None, None, None, 0, 0, 0)


@dataclass
class DeferredUpdate:
    """What :func:`hvd_compress.ops.scatter` would do to residual and velocity after one exchange of a bucket.

    ``indices``: uint8, (slots,). ``segments``: the operators' table. ``spans``: the slots of each segment. ``mean`` and
    ``error``: float32, (slots,). The tensors must not be written to before the next exchange.
    """

    indices: Tensor
    segments: Tensor
    spans: list[slice]
    phase: int
    mean: Tensor
    error: Tensor

    def __post_init__(self) -> None:
        self._pending = [True] * len(self.spans)

    @property
    def pending(self) -> bool:
        """Whether some segment's update has not been applied."""
        return any(self._pending)

    def arguments(self, position: int) -> Arguments:
        """The arguments of accumulate_select for a segment. Call :meth:`mark_applied` after it."""
        if not self._pending[position]:
            return NOT_DEFERRED
        span = self.spans[position]
        return self.indices, self.mean, self.error, span.stop - span.start, span.start, self.phase

    def mark_applied(self, position: int) -> None:
        self._pending[position] = False

    def apply(self, residual: Tensor, velocity: Tensor | None) -> None:
        """Applies what is pending to the bucket's tensors."""
        applied = (span for span, pending in zip(self.spans, self._pending, strict=True) if not pending)
        mean, no_grads = with_nan(self.mean, applied), [residual.new_empty(0)] * len(self.spans)
        ops.scatter(no_grads, residual, velocity, self.indices, self.segments, mean, self.error, self.phase, 0.0)
        self._pending = [False] * len(self.spans)

    def preview(self, position: int, residual: Tensor) -> Tensor:
        """A segment's residual with its update applied: ``residual`` itself or an updated copy."""
        if not self._pending[position]:
            return residual
        residual, span = residual.clone(), self.spans[position]
        rows = [[0, residual.numel() // BLOCK, 0, span.stop - span.start]]
        row = torch.tensor(rows, dtype=torch.int64, device=residual.device)
        no_grads, mean, error = [residual.new_empty(0)], self.mean[span], self.error[span]
        ops.scatter(no_grads, residual, None, self.indices[span], row, mean, error, self.phase, 0.0)
        return residual


def with_nan(mean: Tensor, spans: Iterable[slice]) -> Tensor:
    """``mean`` with NaN in ``spans``: :func:`hvd_compress.ops.scatter` leaves the residual of those slots unchanged."""
    spans = list(spans)
    if spans:
        mean = mean.clone()
        for span in spans:
            mean[span] = math.nan
    return mean
