"""The base class of methods that send every entry in each step."""

from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from .. import ops
from ..codecs.base import Channel, Codec
from ..codecs.scales import moments_table
from ..engine.agreement import LIMIT, Agreement
from ..engine.arguments import NamedParameters, check_flag
from ..engine.bucket import Bucket
from ..engine.collectives import Request
from ..engine.exchange import Exchange, together
from ..engine.rng import derive
from ..engine.state import Fixed, Tree
from ..engine.work import Step, Work
from ..reference import BLOCK
from .base import Compressor


class EveryEntryWork(Work):
    """One bucket: the residual and the codec's channel."""

    def __init__(self, bucket: Bucket, codec: Codec, feedback: bool) -> None:
        self._agreement = Agreement(bucket.device)
        super().__init__(bucket, agreement=self._agreement)
        self._codec, self._feedback = codec, feedback
        self._invalid = torch.zeros(1, dtype=torch.int32, device=bucket.device)
        self.restart()

    def restart(self) -> None:
        super().restart()
        self._channel: Channel | None = None
        #: Whether the last step's values were subtracted from the residual.
        self._swapped = False

    def begin(self, step: Step) -> None:
        super().begin(step)
        self._invalid.zero_()
        self._swapped = False
        if not self._feedback:
            self.bucket.residual.zero_()  # it holds the gradients of a step that failed
        if self._channel is None:
            pieces = self.bucket.pieces
            self._channel = self._codec.channel(len(pieces), step.ranks, step.rank, self.bucket.device)
            self._channel.set_group_sizes([piece.blocks * BLOCK for piece in pieces])
            self._table = moments_table(self._channel.edges)

    def first_requests(self) -> tuple[Request, ...]:
        assert self._channel is not None
        return self._channel.first_requests()

    def accumulate(self) -> None:
        ops.accumulate(*self._given())

    def _given(self) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, float]:
        """The first arguments of the operator."""
        bucket, channel = self.bucket, self._channel
        assert channel is not None
        starts = [self.starts.get(index, empty) for index, empty in enumerate(bucket.nothing())]
        where = bucket.table, channel.edges, self._table, self._squares if self.starts else None, self._invalid
        return bucket.gradients, starts, bucket.residual, *where, 1.0 / self.step.scale

    @cached_property
    def _squares(self) -> Tensor:
        """Sums of squares of gradients less their starts, by block."""
        return torch.empty(self.bucket.blocks, dtype=torch.float64, device=self.bucket.device)

    def _compared(self, exchange: Exchange) -> Exchange:
        """An exchange, with a comparison of the ranks' steps and options, unless another message shows these."""
        if self.step.compared:
            return (yield from exchange)
        digest = torch.full((1,), self.step.digest % LIMIT, dtype=torch.int64, device=self.bucket.device)
        return (yield from together([self._agreement.compare(digest), exchange]))[-1]

    def exchange(self) -> Exchange:
        bucket, step, channel = self.bucket, self.step, self._channel
        assert channel is not None
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
        if self._swapped and self._channel is not None:
            _swap(self.bucket.residual, self._channel.quantization_error)
            self._swapped = False


def _swap(one: Tensor, other: Tensor) -> None:
    """Exchanges the memory of two tensors of one form: the values that were sent, and what remains of them."""
    before: Any = one.detach()
    cast(Any, one).set_(other)
    cast(Any, other).set_(before)


class EveryEntry(Compressor):
    """A method that sends every entry of the gradient in a few bits. ``values``: its codec, whose channels keep nothing
    from step to step. ``error_feedback``: keep the quantization error for the next step."""

    def __init__(
        self, named_parameters: NamedParameters, *, values: Codec, error_feedback: bool = False, **common: Any
    ) -> None:
        self._codec, self._feedback = values, check_flag("error_feedback", error_feedback)
        super().__init__(named_parameters, **common)

    def work(self, bucket: Bucket) -> Work:
        return EveryEntryWork(bucket, self._codec, self._feedback)

    def options(self) -> dict[str, object]:
        return {"values": self._codec, "error_feedback": self._feedback, **super().options()}

    def state(self) -> dict[str, Tree]:
        return {"made_with": {"values": Fixed(self._codec.name), "error feedback": Fixed(self._feedback)}}
