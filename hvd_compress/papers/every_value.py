"""Every entry by a codec that returns averages as values, not in codes: QSGD and TernGrad."""

from typing import Any, cast

import torch
from torch import Tensor

from ..engine.bucket import Bucket
from ..engine.exchange import Exchange
from ..engine.rng import derive
from ..engine.work import Step
from ..methods.every_entry import EveryEntry, EveryEntryWork


class EveryValue(EveryEntry):
    def work(self, bucket: Bucket) -> EveryEntryWork:
        return _EveryValueWork(bucket, self._codec.channel, self._feedback)


class _EveryValueWork(EveryEntryWork):
    #: Whether the last step's values were subtracted from the residual.
    _swapped = False

    def restart(self) -> None:
        super().restart()
        self._swapped = False

    def begin(self, step: Step) -> None:
        super().begin(step)
        self._swapped = False

    def exchange(self) -> Exchange:
        bucket, step, channel = self.bucket, self.step, self._channel
        key, values = derive(step.seed, step.number, bucket.index), bucket.residual
        mean, error = yield from self._compared(channel.average(values, self._invalid, derive(key, step.rank)))
        for piece, grad in zip(bucket.pieces, bucket.gradients, strict=True):
            if not grad.numel():  # nobody receives its average
                piece.of(error).copy_(piece.of(values))
                continue
            torch.mul(piece.of(mean)[: piece.numel], step.scale, out=grad.as_strided((piece.numel,), (1,)))
        wrong = mean[:1].isnan()
        # Free on the CPU; a GPU would be synchronised.
        if not wrong.is_cpu or bool(wrong):
            error.copy_(torch.where(wrong, values, error))
        _swap(bucket.residual, error)
        self._swapped = self._feedback
        if not self._feedback:
            bucket.residual.zero_()

    def undo(self) -> None:
        if self._swapped:
            _swap(self.bucket.residual, self._channel.quantization_error)
            self._swapped = False


def _swap(one: Tensor, other: Tensor) -> None:
    """Exchanges the memory of two tensors of one form: the values that were sent, and what remains of them."""
    before: Any = one.detach()
    cast(Any, one).set_(other)
    cast(Any, other).set_(before)
