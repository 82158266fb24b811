"""The base class of methods that send every entry in each step."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

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
from ..engine.state import Fixed, Tree
from ..engine.work import Step, Work
from ..reference import BLOCK
from .base import Compressor


class EveryEntryWork(Work):
    """One bucket: the residual and the codec's channel, which is made in the first step with these ranks."""

    _channel: Channel

    def __init__(
        self, bucket: Bucket, channel: Callable[[int, int, int, torch.device], Channel], feedback: bool
    ) -> None:
        self._agreement = Agreement(bucket.device)
        super().__init__(bucket, agreement=self._agreement)
        self._new_channel, self._feedback = channel, feedback
        self._invalid = torch.zeros(1, dtype=torch.int32, device=bucket.device)
        self.restart()

    def restart(self) -> None:
        super().restart()
        vars(self).pop("_channel", None)

    def begin(self, step: Step) -> None:
        super().begin(step)
        self._invalid.zero_()
        if not self._feedback:
            self.bucket.residual.zero_()  # it holds the gradients of a step that failed
        if not hasattr(self, "_channel"):
            pieces = self.bucket.pieces
            channel = self._new_channel(len(pieces), step.ranks, step.rank, self.bucket.device)
            channel.set_group_sizes([piece.blocks * BLOCK for piece in pieces])
            self._table, self._channel = moments_table(channel.edges), channel

    def first_requests(self) -> tuple[Request, ...]:
        return self._channel.first_requests()

    def accumulate(self) -> None:
        bucket = self.bucket
        starts = [self.starts.get(index, empty) for index, empty in enumerate(bucket.nothing())]
        where = bucket.table, self._channel.edges, self._table, self._squares if self.starts else None, self._invalid
        ops.accumulate(bucket.gradients, starts, bucket.residual, *where, 1.0 / self.step.scale, *self._sent_codes())

    def _sent_codes(self) -> tuple[Any, ...]:
        """The operator's last arguments: the codes that the residual still contains; none if ``()``."""
        return ()

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


class EveryEntry(Compressor):
    """A method that sends every entry of the gradient in a few bits. ``values``: its codec, whose channels keep nothing
    from step to step. ``error_feedback``: keep the quantization error for the next step."""

    def __init__(
        self, named_parameters: NamedParameters, *, values: Codec, error_feedback: bool = False, **common: Any
    ) -> None:
        self._codec, self._feedback = values, check_flag("error_feedback", error_feedback)
        super().__init__(named_parameters, **common)

    def options(self) -> dict[str, object]:
        return {"values": self._codec, "error_feedback": self._feedback, **super().options()}

    def state(self) -> dict[str, Tree]:
        return {"made_with": {"values": Fixed(self._codec.name), "error feedback": Fixed(self._feedback)}}
