"""Layer-wise significance, compensation and distribution-based encoding (MIPD: Zhang & Wang, TPDS 33(11), 2022)."""

from typing import Any

import torch
from torch import Tensor

from ..codecs import Codec
from ..engine.arguments import NamedParameters, check_fraction
from ..engine.bucket import Bucket
from ..engine.exchange import Exchange
from ..engine.rng import derive
from ..engine.state import TensorLeaf, Tree
from ..selection.base import Average, BlockRange, Selection, whole
from ..selection.history import GradientHistory, flat_weights, root_mean_squares
from ..selection.schedule import Density
from ..selection.shared import ScoredSelection, SharedSelection, smaller_half
from .sparse import Plan, SparseMethod

_SIGNIFICANCE = ("taylor", "fisher")


class MIPD(SparseMethod):
    r"""MIPD: entries are selected by a significance that all ranks compute from shared state; no indices are sent.

    Implements the published idea of Zhang & Wang, *MIPD: An Adaptive Gradient Sparsification Framework for Distributed
    DNNs Training* (IEEE TPDS 33(11), 2022). On rank i, for one parameter with gradient g_i and residual r_i; weights w,
    smoothed average gradient e (per step) and t, the steps since an entry was last sent, are equal on all ranks::

        a_i = r_i + g_i                                         with momentum u_i instead of g_i, as in IWP
        s   = (|w| + floor rms(w)) (|e| + floor rms(e)) t       significance
        S   = the m largest s of every 256, in that half of the layer whose turn it is
        p   = compensation e                                    in that half, 0 in the other
        g   = p + mean_i Q((a_i - p)[S]) on S, p off it         Q: the codec
        r_i = a_i - p - Q((a_i - p)[S]) on S, a_i - p off it
        e   = smoothing e + (1 - smoothing) (received value / t + compensation applied since)   on S

    The paper's: significance by the model's interpretability; layers' shares (``budget_interval``); half of the
    parameters a step; exponential smoothing in place of what was not sent; each layer encoded by its own distribution.
    Ours: first-order attribution, ``|w e|``, as significance, from shared state; the factor t, without which the same
    few entries would be selected in every step; halves as first and last blocks of a layer; the residual, which
    corrects the errors of p; the codecs.

    In each step the ranks compare seed, step, options and a hash of the selected entries, and raise an error if they
    differ (on a GPU in every hundredth step, since the comparison synchronises it).

    Args:
        density: entries sent in a step as a share of all, in (0, 1], or a schedule. Above 1/2 there are no halves;
            just below 1/2, a layer sends at most as many entries as its smaller half has.
        values: how values are encoded: the name of a codec or a codec (:mod:`hvd_compress.codecs`). Lanes and Lloyd-Max
            codebooks fit each layer's distribution.
        layerwise: encode each layer by its own distribution; False encodes a bucket by one (the paper's baseline).
        significance: ``"taylor"``, ``|w e|``, or ``"fisher"``, ``e^2``.
        compensation: the share of the smoothed gradient that is applied where nothing was sent, in [0, 1].
        smoothing: weight of the past in e, in [0, 1).
        floor: the constant under ``|w|`` and ``|e|``, in units of their root mean square; above 0.
        explore: share of the blocks in which entries are drawn at random in proportion to significance, in [0, 1].
        budget_interval: steps between updates of the parameters' shares of a bucket's slots by significance (each
            within 1/4 and 4 times the density); 0 keeps the shares equal.
        warmup_steps, momentum: see :class:`~hvd_compress.IWP`.

    Other arguments, and errors: see :class:`~hvd_compress.Compressor`.
    """

    def __init__(
        self,
        named_parameters: NamedParameters,
        density: float | Density = 1 / 64,
        *,
        values: str | Codec = "lanes4",
        layerwise: bool = True,
        significance: str = "taylor",
        compensation: float = 0.0,
        smoothing: float = 0.9,
        floor: float = 0.5,
        explore: float = 0.05,
        budget_interval: int = 100,
        warmup_steps: int = 0,
        momentum: float = 0.0,
        **common: Any,
    ) -> None:
        if significance not in _SIGNIFICANCE:
            raise ValueError(f"significance must be one of {', '.join(_SIGNIFICANCE)}, got {significance!r}")
        check_fraction("compensation", compensation)
        if not floor > 0.0:
            raise ValueError(f"floor must be above 0, got {floor}")
        check_fraction("explore", explore)
        common.update(values=values, budget_interval=budget_interval, warmup_steps=warmup_steps, momentum=momentum)
        super().__init__(named_parameters, density, layerwise=layerwise, **common)
        self._significance, self._compensation, self._smoothing = significance, compensation, smoothing
        self._floor, self._explore = floor, explore
        #: Per bucket, ``floor`` times the root mean squares of weights and smoothed gradients: float32, (2, segments).
        self._floors = [torch.zeros(2, len(b.segments), dtype=torch.float32, device=b.device) for b in self.buckets]
        #: For undo(): per bucket, where the last step's prediction was applied, and whether the step was valid.
        self._predicted: list[list[tuple[BlockRange, Tensor]]] = [[] for _ in self.buckets]
        self._history = [GradientHistory(bucket, smoothing) for bucket in self.buckets]

    # Selection.

    def select(self, bucket: Bucket, plan: Plan, slots: list[int], density: float) -> Selection:
        return ScoredSelection(bucket, slots, halves=density <= 0.5)

    def max_slots(self, bucket: Bucket, plan: Plan, density: float) -> list[int]:
        return [smaller_half(s) if density <= 0.5 else s.numel for s in bucket.segments]

    def begin(self, bucket: Bucket) -> None:
        super().begin(bucket)
        self._predicted[bucket.index] = []
        # Often at first, while the smoothed gradient changes fast.
        if self.step & (self.step - 1) == 0 or self.step % 64 == 0:
            sizes = root_mean_squares(bucket, flat_weights(bucket), bucket.state["smoothed"])
            self._floors[bucket.index] = torch.stack(sizes) * self._floor

    def significance(self, bucket: Bucket, position: int, part: BlockRange) -> Tensor:
        """The significance of some of a segment's entries, in memory order: float32, (entries,), the same bits on all
        ranks."""
        weights, smoothed = self._floors[bucket.index].unbind()
        weight = part.of(bucket.segments[position].parameter.detach())
        n = weight.numel()
        score = part.of_bucket(bucket.state["smoothed"])[:n].abs() + smoothed[position]
        if self._significance == "fisher":
            score.mul_(score)
        else:
            score.mul_(weight.float().abs() + weights[position])
        return score.mul_(self.step - part.of_bucket(bucket.state["last_sent"])[:n])

    def importance(self, bucket: Bucket, plan: Plan) -> Tensor:
        parts = [self.significance(bucket, i, whole(segment)) for i, segment in enumerate(bucket.segments)]
        return torch.stack([score.sum(dtype=torch.float64) for score in parts])

    # The exchange.

    def exchange_values(self, bucket: Bucket, plan: Plan) -> Exchange:
        selection, state = plan.selection, bucket.state
        assert isinstance(selection, SharedSelection)
        if isinstance(selection, ScoredSelection):
            for position, part in enumerate(selection.ranges):
                selection.select(position, self.significance(bucket, position, part), self._explore)
        yield from selection.agree(plan.scoring)
        values, smoothed = selection.gather(bucket.residual), selection.read(state["smoothed"])
        prediction = smoothed * self._compensation
        key = derive(selection.seed.key, self.rank)
        mean, error = yield from plan.channel.average(values - prediction, plan.invalid, key)
        targets = self.targets(bucket, plan)
        if self._compensation:
            self._apply_prediction(bucket, selection, targets, mean[:1].isfinite())
        sent = selection.skip_missing(targets, mean + prediction)
        selection.scatter(targets, state.get("velocity"), Average(sent, error, self.output()))
        share = 0.5 if selection.halves else 1.0
        self._history[bucket.index].update(selection, mean, self.step, smoothed * (share * self._compensation))
        plan.sent = True

    def _apply_prediction(
        self, bucket: Bucket, selection: SharedSelection, targets: list[Tensor], valid: Tensor
    ) -> None:
        """Writes the prediction to all candidates; the values that were sent are then written over it."""
        for part, target in zip(selection.candidates(), targets, strict=True):
            if target.numel():
                prediction = self._prediction(bucket, part, valid)
                part.of_bucket(bucket.residual).sub_(prediction)
                entries = part.of(target)
                entries.copy_(prediction[: entries.numel()] * self.scale)
                self._predicted[bucket.index].append((part, valid))

    def _prediction(self, bucket: Bucket, part: BlockRange, valid: Tensor) -> Tensor:
        return (part.of_bucket(bucket.state["smoothed"]) * self._compensation).masked_fill_(~valid, 0.0)

    def undo(self, bucket: Bucket) -> None:
        if self._plans[bucket.index].sent:
            # The smoothed gradient has changed only where something was sent, and there super() restores the residual.
            for part, valid in self._predicted[bucket.index]:
                part.of_bucket(bucket.residual).add_(self._prediction(bucket, part, valid))
            self._history[bucket.index].undo()
        super().undo(bucket)

    def restart(self, bucket: Bucket) -> None:
        super().restart(bucket)
        self._history[bucket.index].restart()
        self._floors[bucket.index].zero_()

    def method_state(self) -> dict[str, Tree]:
        floors: Tree = {
            segment.name: {"weight": TensorLeaf(weight, low=0.0), "smoothed": TensorLeaf(smoothed, low=0.0)}
            for bucket, floors in zip(self.buckets, self._floors, strict=True)
            for segment, weight, smoothed in zip(bucket.segments, *floors, strict=True)
        }
        return {**super().method_state(), "floors": floors}
