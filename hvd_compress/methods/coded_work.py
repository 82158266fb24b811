"""A bucket of :class:`.Quantized`: what was sent stays in the residual until the next exchange subtracts its codes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..codecs.grouped_ring import Coded, GroupedChannel
from ..engine.bucket import Bucket, Piece
from ..engine.exchange import Exchange
from ..engine.work import Step
from ..reference import BLOCK
from .every_entry import EveryEntryWork


class CodedWork(EveryEntryWork):
    """One bucket: the residual, what it contains though it was sent, and the channel.

    ::

        accumulate()  residual = a = residual - sent + gradient     sent: in codes; nothing if it was taken back
        exchange()    sent = Q(a), but not in this rank's part, whose errors are kept beside the residual
        commit()      the residual of this rank's part becomes these errors; nothing is taken back any more
    """

    _channel: GroupedChannel

    def __init__(self, bucket: Bucket, channel: Callable[..., GroupedChannel], feedback: bool) -> None:
        self._sent: Coded | None = None
        self._means: Coded | None = None
        #: By place in this rank's part, the errors of the averages; None once they are committed.
        self._errors: list[tuple[slice, Tensor]] | None = None
        #: The residual without what was sent, if somebody has asked for it and the latter may be taken back.
        self._copy: Tensor | None = None
        super().__init__(bucket, channel, feedback)

    def restart(self) -> None:
        self.settle()
        super().restart()

    def begin(self, step: Step) -> None:
        self.commit()
        super().begin(step)

    def accumulate(self) -> None:
        super().accumulate()
        self._sent = None  # now it is subtracted

    def _sent_codes(self) -> tuple[Any, ...]:
        if self._sent is None:
            return ()
        codes, scale, _, book, kind = self._sent.tables
        return codes, scale, book, kind, self._sent.bits

    def exchange(self) -> Exchange:
        bucket, channel = self.bucket, self._channel
        self._means, sent, error, self._wrong = yield from self._compared(
            channel.averages(bucket.residual, self._invalid, self._table)
        )
        errors = list[tuple[slice, Tensor]]()
        for index, (piece, grad) in enumerate(zip(bucket.pieces, bucket.gradients, strict=True)):
            if not grad.numel():  # nobody receives its average
                sent.scale[channel.runs_of[index]] = 0.0
                continue
            first = piece.first_block * BLOCK
            begin, end = max(first, channel.begin), min(first + piece.blocks * BLOCK, channel.end)
            if begin < end:
                errors.append((slice(begin, end), error[begin - channel.begin : end - channel.begin]))
            if index not in self.starts:
                flat = grad.as_strided((piece.numel,), (1,))
                mean = flat if flat.dtype == torch.float32 else torch.empty_like(flat, dtype=torch.float32)
                self.average_of(index).write(mean)
                if mean is not flat or self.step.scale != 1.0:
                    torch.mul(mean, self.step.scale, out=flat)
        if self._feedback:
            self._sent, self._errors = sent, errors
        else:
            bucket.residual.zero_()

    def square_of(self, index: int) -> Tensor:
        """The sum of squares of a gradient less its start, once all have arrived: float64, ()."""
        return self.bucket.pieces[index].of_blocks(self._squares).sum()

    def average_of(self, index: int) -> Coded:
        """The average of a gradient, after the exchange and before the next one."""
        assert self._means is not None
        return self._channel.of_group(self._means, index, self.bucket.pieces[index].numel)

    def undo(self) -> None:
        if self._errors is not None:
            self._sent, self._errors, self._copy = None, None, None

    def commit(self) -> None:
        self._write_errors(self.bucket.residual)
        self._errors, self._copy, self._means = None, None, None

    def settle(self) -> None:
        """Subtracts what was sent from the residual."""
        self.commit()
        if self._sent is not None:
            self._sent.subtract_from(self.bucket.residual)
        self._sent = None

    def _write_errors(self, residual: Tensor) -> None:
        for place, error in self._errors or ():
            values = residual[place]
            if not self._wrong.is_cpu:  # it would be synchronised
                values.copy_(torch.where(self._wrong, values, error * self.step.ranks))
            elif not self._wrong:  # in the sum they are as many times as large
                torch.mul(error, self.step.ranks, out=values)

    def unsent(self) -> Tensor:
        if self._errors is None:
            self.settle()
            return self.bucket.residual
        if self._copy is None and self._sent is not None:
            self._copy = self.bucket.residual.clone()
            self._write_errors(self._copy)
            self._sent.subtract_from(self._copy)
        return self.bucket.residual if self._copy is None else self._copy

    def set_residual(self, piece: Piece, entries: Tensor) -> None:
        self.settle()
        super().set_residual(piece, entries)

    def scale_residual(self, factor: float) -> None:
        self.settle()
        super().scale_residual(factor)
