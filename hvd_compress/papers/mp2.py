"""MP2 (Liu et al., Computer Networks 255, 2024): entries that are not sent are predicted."""

from typing import Any

import torch
from torch import Tensor

from ..codecs import Codec
from ..codecs.scales import Moments
from ..engine.agreement import all_equal
from ..engine.arguments import NamedParameters, check_flag
from ..engine.bucket import Bucket
from ..engine.exchange import Exchange
from ..engine.hashes import hash_of
from ..methods.sparse import SparseMethod
from ..methods.sparse_work import Sending, SparseWork
from ..reference import BLOCK
from ..selection.deciders import Shared
from ..selection.pickers import Blocks
from ..selection.schedule import check_density
from .history import GradientHistory, flat_weights
from .prediction import Prediction

_TINY = 1e-12
# Weight of the past in smoothed gradients, and the constant under their size in units of their root mean square.
_SMOOTHING, _FLOOR = 0.7, 0.5
_PRIME = 1048573  # the largest below agreement.LIMIT
# Steps between two comparisons of predictions and weights.
_CHECK_INTERVAL = 100


class MP2(SparseMethod):
    r"""MP2: a part of the entries is sent, and a small network predicts the others from shared state.

    Implements the published idea of Liu et al., *MP2* (Computer Networks 255, 2024). On rank i, for one parameter with
    gradient g_i and residual r_i; h is the same on all ranks::

        a_i = r_i + g_i                                         with momentum u_i instead of g_i, as in IWP
        S   = m of every 256 entries, drawn in proportion to |smoothed| + rms(smoothed) / 2
        h   = predictor(received values on S; S; age; last received values; their trend; w), 0 where the gate is closed
        g   = mean_i Q(a_i[S]) on S, h off it                   Q: the codec
        r_i = a_i - Q(a_i[S]) on S, a_i - h off it

    The gate of a layer is open while the cosine of prediction and received gradient is at least 0.1. Without
    ``prediction``, h is 0.

    The paper's: a part is pushed, by default a ninth, and the rest is predicted by a network of convolution, channel
    attention and max pooling, trained beforehand on recorded trainings, where training shows that it is good. Ours:
    which entries are sent (with prediction those that were predicted badly more often, since only their errors are
    sent); the residual, so that over all steps nothing is lost; the predictor's inputs, sizes and training
    (``docs/methods.md``); the measure of the gate; a step predicts a ninth of the windows, the others keep
    their prediction until their turn.

    Every rank computes the predictions itself, so all ranks need the same type of processor and number of threads. They
    compare a checksum every 100 steps.

    Example::

        compression = hvd_compress.MP2(model, density=1 / 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        compression.take_momentum(optimizer)  # better accuracy
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(compression, hvd_compress.ddp_hook)

    Args:
        density: entries sent in a step as a share of all; a number.
        prediction: predict unsent entries. Off by default: it costs time, and the shipped predictor gains little
            (docs/methods.md).

    Other arguments, and errors: see :class:`~hvd_compress.methods.sparse.SparseMethod`.

    Raises:
        RuntimeError: the ranks' predictions or weights differ.
    """

    def __init__(
        self,
        named_parameters: NamedParameters,
        density: float = 1 / 9,
        *,
        values: str | Codec = "lanes4",
        prediction: bool = False,
        **common: Any,
    ) -> None:
        self._prediction = check_flag("prediction", prediction)
        super().__init__(named_parameters, check_density(density), values=values, **common)

    def sparse_work(self, bucket: Bucket, sending: Sending) -> SparseWork:
        return _MP2Work(bucket, sending, self._prediction)

    def options(self) -> dict[str, object]:
        return {**super().options(), "prediction": self._prediction}

    def made_with(self) -> dict[str, Any]:
        return {**super().made_with(), "prediction": self._prediction}


class _MP2Work(SparseWork):
    def __init__(self, bucket: Bucket, sending: Sending, prediction: bool) -> None:
        self.period = max(1, round(1 / sending.density(0)))
        self._history = GradientHistory(bucket, _SMOOTHING)
        self.prediction = Prediction(bucket, self.period, _SMOOTHING) if prediction else None
        parts: dict[str, Any] = {} if self.prediction is None else {"prediction": self.prediction}
        # The edges of pieces in the bucket's flat memory.
        ends = [0, *((piece.first_block + piece.blocks) * BLOCK for piece in bucket.pieces)]
        self._ends = torch.tensor(ends, dtype=torch.int64, device=bucket.device)
        super().__init__(bucket, sending, history=self._history, **parts)

    def decide(self, slots: list[int]) -> Shared:
        picker = Blocks(self.bucket, slots)
        if self.prediction is not None:
            self.prediction.lay_out(picker)
        return self.shared(picker)

    def send(self) -> Exchange:
        picker, history, prediction, step = self.decider.picker, self._history, self.prediction, self.step
        if isinstance(picker, Blocks):
            picker.pick_by(self.significance(), 1.0)  # S
        yield from self.agree()
        mean, error = yield from self.average()
        if prediction is not None and self.density < 1.0:
            prediction.follow(picker, mean, history.last_sent, step, self.bucket.gradients)  # h
        self.apply(mean, error)
        history.update(picker, mean, step.number)
        if prediction is not None and step.every(_CHECK_INTERVAL):
            yield from self._compare(prediction)

    def significance(self) -> list[Tensor]:
        """The significance of each piece's entries, in memory order: float32, (entries,), bit-equal on all ranks."""
        smoothed = self._history.smoothed
        units = Moments(smoothed, self._ends).rms.float() + _TINY
        pairs = zip(self.bucket.pieces, units, strict=True)
        return [piece.of(smoothed)[: piece.numel].abs() + _FLOOR * unit for piece, unit in pairs]

    def _compare(self, prediction: Prediction) -> Exchange:
        """Raises ``RuntimeError``, on every rank, if their predictions or weights differ."""
        # Modulo a prime, so that every bit counts.
        digest = hash_of([prediction.guess, prediction.trend, *flat_weights(self.bucket)]) % _PRIME
        same = yield from all_equal(torch.full((1,), digest, dtype=torch.int64, device=self.bucket.device), "checksum")
        if not bool(same):
            raise RuntimeError(
                "MP2: the ranks' predictions or weights differ. Predictions are bit-equal on one type of processor and "
                "with equal numbers of threads (torch.set_num_threads); weights, if they were broadcast at the start. "
                "Use prediction=False if the ranks' hardware differs"
            )
