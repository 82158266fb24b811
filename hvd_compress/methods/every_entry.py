"""The base class of methods that send every entry in each step."""

from typing import Any, cast

import torch
from torch import Tensor

from .. import ops
from ..codecs.base import Channel, Codec
from ..codecs.grouped_ring import means_by_group
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
        self._sent = False

    def begin(self, step: Step) -> None:
        super().begin(step)
        self._invalid.zero_()
        self._sent = False
        if not self._feedback:
            self.bucket.residual.zero_()  # it holds the gradients of a step that failed
        if self._channel is None:
            pieces = self.bucket.pieces
            self._channel = self._codec.channel(len(pieces), step.ranks, step.rank, self.bucket.device)
            self._channel.set_group_sizes([piece.blocks * BLOCK for piece in pieces])

    def first_requests(self) -> tuple[Request, ...]:
        assert self._channel is not None
        return self._channel.first_requests()

    def accumulate(self) -> None:
        bucket = self.bucket
        ops.accumulate(bucket.gradients, bucket.residual, bucket.table, self._invalid, 1.0 / self.step.scale)

    def exchange(self) -> Exchange:
        bucket, step, channel = self.bucket, self.step, self._channel
        assert channel is not None
        key, values = derive(step.seed, step.number, bucket.index), bucket.residual
        parts: list[Exchange] = [means_by_group(channel, values, self._invalid, derive(key, step.rank))]
        if not step.compared:  # no other message shows whether the ranks are in the same step, with the same options
            digest = torch.full((1,), step.digest % LIMIT, dtype=torch.int64, device=bucket.device)
            parts.insert(0, self._agreement.compare(digest))
        means, error, wrong = (yield from together(parts))[-1]
        for number, (piece, grad) in enumerate(zip(bucket.pieces, bucket.gradients, strict=True)):
            if not grad.numel():  # nobody receives its average
                piece.of(error).copy_(piece.of(values))
                continue
            flat = grad.as_strided((piece.numel,), (1,))
            mean = flat if flat.dtype == torch.float32 else torch.empty_like(flat, dtype=torch.float32)
            means(number, mean)
            if mean is not flat or step.scale != 1.0:
                torch.mul(mean, step.scale, out=flat)
        # Free on the CPU; a GPU would be synchronised.
        if not wrong.is_cpu or bool(wrong):
            error.copy_(torch.where(wrong, values, error))
        _swap(bucket.residual, error)
        self._sent = self._feedback
        if not self._feedback:
            bucket.residual.zero_()

    def undo(self) -> None:
        if self._sent and self._channel is not None:
            _swap(self.bucket.residual, self._channel.quantization_error)
            self._sent = False


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

    def work(self, bucket: Bucket) -> EveryEntryWork:
        return EveryEntryWork(bucket, self._codec, self._feedback)

    def options(self) -> dict[str, object]:
        return {"values": self._codec, "error_feedback": self._feedback, **super().options()}

    def state(self) -> dict[str, Tree]:
        return {"made_with": {"values": Fixed(self._codec.name), "error feedback": Fixed(self._feedback)}}
