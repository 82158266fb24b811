"""What methods that send every entry have in common."""

from typing import Any

from ..codecs import Codec
from ..engine.arguments import NamedParameters, check_flag
from ..engine.bucket import Bucket
from ..engine.exchange import Exchange
from ..engine.state import Fixed, Tree
from ..engine.work import Step
from ..selection.pickers import Everything
from .feedback import FeedbackWork, Wire
from .momentum import MomentumMethod


class EveryEntryWork(FeedbackWork):
    """One bucket of them."""

    def __init__(self, bucket: Bucket, wire: Wire, feedback: bool) -> None:
        super().__init__(bucket, wire)
        self._feedback = feedback
        self.decider = self.shared(Everything(bucket))

    def lay_out(self) -> None:
        self.values.lay_out(self.decider.picker.slots)

    def begin(self, step: Step) -> None:
        if not self._feedback:
            self.bucket.residual.zero_()  # the gradients of a step that failed
        super().begin(step)

    def exchange(self) -> Exchange:
        yield from self.send()
        if not self._feedback:
            self.bucket.residual.zero_()
            self.values.sent = False  # nothing of a skipped step is restored, except by momentum correction


class EveryEntry(MomentumMethod):
    """A method that sends every entry of the gradient in a few bits.

    Args:
        values: the codec that is the method.
        error_feedback: keep the quantization error for the next step.
    """

    works: list[EveryEntryWork]

    def __init__(
        self,
        named_parameters: NamedParameters,
        *,
        values: Codec,
        error_feedback: bool = False,
        momentum: float = 0.0,
        **common: Any,
    ) -> None:
        self._codec, self._feedback = values, check_flag("error_feedback", error_feedback)
        super().__init__(named_parameters, momentum=momentum, **common)

    def work(self, bucket: Bucket) -> EveryEntryWork:
        return EveryEntryWork(bucket, Wire(self._codec, self.collectives), self._feedback)

    def options(self) -> dict[str, object]:
        return {"values": self._codec, "error_feedback": self._feedback, **super().options()}

    def state(self) -> dict[str, Tree]:
        made_with: Tree = {
            "values": Fixed(self._codec.name),
            "error feedback": Fixed(self._feedback),
        }
        return {"made_with": made_with, **super().state()}
