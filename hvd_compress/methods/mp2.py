"""Entries that are not sent are predicted (MP2: Liu et al., Computer Networks 255, 2024)."""

from typing import Any

import torch
from torch import Tensor

from ..codecs import Codec
from ..codecs.scales import Moments
from ..engine.agreement import all_equal
from ..engine.arguments import NamedParameters
from ..engine.bucket import Bucket
from ..engine.exchange import Exchange
from ..engine.state import TensorLeaf, Tree
from ..reference import BLOCK
from ..selection.base import Selection
from ..selection.history import GradientHistory, flat_weights
from ..selection.schedule import check_density
from ..selection.shared import AllEntries, RotatingSelection, ScoredSelection, SharedSelection
from .prediction import Prediction
from .predictor import Predictor, predict, shipped
from .sparse import Plan, SparseMethod

_CHOICES = ("significance", "rotation")
_TINY = 1e-12
_PRIME = 1048573  # the largest below agreement.LIMIT


class MP2(SparseMethod):
    r"""MP2: a part of the entries is sent, and a small network predicts the others from shared state.

    Implements the published idea of Liu et al., *MP2* (Computer Networks 255, 2024): workers push a subset of the
    parameters, and the rest is predicted by an already trained network of convolution, channel attention and max
    pooling, where training shows that its predictions are good. On rank i::

        S   = drawn in proportion to the smoothed gradient         no indices are sent
        h   = predictor(last values; ages; smoothed; weights)      the same on all ranks; 0 where the gate is closed
        g   = mean_i a_i[S] on S, h off it                         a_i = r_i + g_i
        r_i = a_i - what was sent on S, a_i - h off it              includes prediction errors

    The gate of a layer is open while the cosine of prediction and received gradient is at least ``gate``.

    The paper's: the predictor's architecture, predicting what is not sent, using predictions only where they are good.
    Ours: which entries are sent, the residual, the predictor's inputs and training (``train_predictor.py``),
    the criterion of the gate.

    Every rank computes the predictions itself, so all ranks need the same type of processor and number of threads. They
    compare a checksum every ``check_interval`` steps.

    Args:
        density: entries sent in a step as a share of all, in (0, 1].
        choice: ``"significance"``: m of every 256, drawn at random in proportion to the smoothed gradient's magnitude.
            ``"rotation"``: every n-th entry in turn; the density must be 1 / n. Equal delays of all entries can make
            training oscillate; random ones do not.
        values: how values are encoded: the name of a codec or a codec (:mod:`hvd_compress.codecs`).
        prediction: predict what is not sent. Off by default: it costs time, and the shipped predictor gains little
            (docs/mp2.md).
        gate: the smallest cosine at which predictions are used, in [-1, 1].
        smoothing: weight of the past in smoothed gradients, in [0, 1).
        floor: the constant under the smoothed gradient's size, in units of its root mean square; above 0.
        check_interval: steps between checksums of predictions and weights; 0 never compares them.
        predictor: replaces the shipped predictor; the same on all ranks.
        momentum: see :class:`~hvd_compress.IWP`.
        Others, and errors: see :class:`~hvd_compress.Compressor`.

    Raises:
        RuntimeError: the ranks' predictions or weights differ.
    """

    def __init__(
        self,
        named_parameters: NamedParameters,
        density: float = 1 / 9,
        *,
        choice: str = "significance",
        values: str | Codec = "lanes4",
        prediction: bool = False,
        gate: float = 0.1,
        smoothing: float = 0.7,
        floor: float = 0.5,
        check_interval: int = 100,
        predictor: Predictor | None = None,
        momentum: float = 0.0,
        **common: Any,
    ) -> None:
        if not isinstance(density, int | float):
            raise TypeError(f"density must be a number, got {density!r}")
        if choice not in _CHOICES:
            raise ValueError(f"choice must be one of {', '.join(_CHOICES)}, got {choice!r}")
        check_density(density)
        if choice == "rotation" and abs(round(1 / density) * density - 1) > 1e-6:
            raise ValueError(f'choice="rotation" takes a density of 1 / n, got {density}')
        if not floor > 0.0:
            raise ValueError(f"floor must be above 0, got {floor}")
        if not -1.0 <= gate <= 1.0:
            raise ValueError(f"gate must lie in [-1, 1], got {gate}")
        if check_interval < 0:
            raise ValueError(f"check_interval must not be negative, got {check_interval}")
        super().__init__(named_parameters, density, values=values, momentum=momentum, **common)
        self._period, self._choice, self._floor = max(1, round(1 / density)), choice, floor
        self._gate, self._smoothing = gate, smoothing
        self._check_interval, self._predictor = check_interval, predictor
        history = prediction or choice == "significance"  # the rotation alone needs none
        self._history = [GradientHistory(bucket, smoothing) for bucket in self.buckets] if history else []
        self._predictions = [
            Prediction(bucket, self.predict, self._period, gate, smoothing) for bucket in self.buckets if prediction
        ]
        self._ends = [_ends(bucket) for bucket in self.buckets]

    def open_layers(self) -> dict[str, bool]:
        """Whether the gate of each compressed parameter is open, by name. Empty without prediction."""
        return {
            segment.name: opened
            for bucket, prediction in zip(self.buckets, self._predictions, strict=False)
            for segment, opened in zip(bucket.segments, prediction.opened(), strict=True)
        }

    def select(self, bucket: Bucket, plan: Plan, slots: list[int], density: float) -> Selection:
        rotates = self._choice == "rotation"
        selection = RotatingSelection(bucket, self._period) if rotates else ScoredSelection(bucket, slots, False)
        if self._predictions:
            self._predictions[bucket.index].lay_out(selection)
        return selection

    def begin(self, bucket: Bucket) -> None:
        if self._predictions:
            self._predictions[bucket.index].begin()
        super().begin(bucket)

    def exchange_values(self, bucket: Bucket, plan: Plan) -> Exchange:
        selection = plan.selection
        assert isinstance(selection, SharedSelection)
        if isinstance(selection, ScoredSelection):
            for position, score in enumerate(self.significance(bucket)):
                selection.select(position, score, 1.0)
        yield from super().exchange_values(bucket, plan)
        if self._history:
            self._history[bucket.index].update(selection, plan.channel.mean, self.step)
        interval = self._check_interval
        if self._predictions and interval and self.step % interval == interval - 1:
            yield from self._compare(bucket)

    def averaged(self, bucket: Bucket, plan: Plan, mean: Tensor) -> None:
        selection = plan.selection
        assert isinstance(selection, SharedSelection)
        if not self._predictions or isinstance(selection, AllEntries):
            return
        prediction, last_sent = self._predictions[bucket.index], self._history[bucket.index].last_sent
        waited = (self.step - selection.read(last_sent)).clamp(min=1.0)
        fresh = prediction.update(selection, mean, waited)
        prediction.predict(selection, fresh, self.step, last_sent)
        prediction.apply(self.targets(bucket, plan), self.scale)
        prediction.sent(selection)

    def significance(self, bucket: Bucket) -> list[Tensor]:
        """The significance of each segment's entries, in memory order: float32, (entries,), the same bits on all
        ranks."""
        smoothed = bucket.state["smoothed"]
        units = Moments(smoothed, self._ends[bucket.index]).rms.float() + _TINY
        return [
            segment.of(smoothed)[: segment.numel].abs() + self._floor * unit
            for segment, unit in zip(bucket.segments, units, strict=True)
        ]

    def predict(self, bucket: Bucket, position: int, windows: Tensor, seen: Tensor) -> Tensor:
        """The predicted gradients per step of some ``windows`` of a segment, int64 (n,): float32 (n, 256), in units of
        the layer's root mean square. ``seen``: their inputs, see ``hvd_compress/methods/predictor.py``."""
        return predict(self._predictor or shipped(bucket.device), seen)

    def undo(self, bucket: Bucket) -> None:
        if self._predictions:
            self._predictions[bucket.index].undo()
        if self._history and self._plans[bucket.index].sent:
            self._history[bucket.index].undo()
        super().undo(bucket)

    def _compare(self, bucket: Bucket) -> Exchange:
        """Raises ``RuntimeError``, on every rank, if their predictions or weights differ."""
        bits = torch.cat([bucket.state["guess"], bucket.state["trend"], *flat_weights(bucket)]).view(torch.int32).long()
        place = torch.arange(bits.numel(), dtype=torch.int64, device=bits.device) % 8191 + 1
        # Modulo a prime, so that every bit counts.
        same = yield from all_equal(((bits * place) % _PRIME).sum().remainder(_PRIME).view(1), "checksum")
        if not bool(same):
            raise RuntimeError(
                "MP2: the ranks' predictions or weights differ. Predictions are bit-equal on one type of processor and "
                "with equal numbers of threads (torch.set_num_threads); weights, if they were broadcast at the start. "
                "Use prediction=False if the ranks' hardware differs"
            )

    def restart(self, bucket: Bucket) -> None:
        super().restart(bucket)
        if self._history:
            self._history[bucket.index].restart()
        if self._predictions:
            self._predictions[bucket.index].restart()

    def built_with(self) -> dict[str, Any]:
        return {**super().built_with(), "prediction": bool(self._predictions), "choice": self._choice}

    def method_state(self) -> dict[str, Tree]:
        fits: Tree = {
            str(bucket.index): {
                "product": TensorLeaf(prediction.fit[0]),
                "squares": TensorLeaf(prediction.fit[1:], low=0.0),
            }
            for bucket, prediction in zip(self.buckets, self._predictions, strict=False)
        }
        return {**super().method_state(), "fit": fits}


def _ends(bucket: Bucket) -> Tensor:
    """Where segments begin and end in the bucket's flat memory: int64, (segments + 1,)."""
    ends = [0, *(segment.first_block + segment.blocks for segment in bucket.segments)]
    return torch.tensor(ends, dtype=torch.int64, device=bucket.device) * BLOCK
