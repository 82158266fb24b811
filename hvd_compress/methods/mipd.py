"""Layer-wise significance, compensation and distribution-based encoding (MIPD: Zhang & Wang, TPDS 33(11), 2022)."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..engine.bucket import Bucket
from ..codecs import Codec
from ..engine.exchange import Exchange
from ..selection.history import History, flat_weights, root_mean_squares
from ..engine.rng import derive
from ..selection.schedule import Density
from ..selection.base import (
    Averages,
    Part,
    Selection,
    SharedSelection,
    Turn,
    Unled,
    check_explore,
    smaller_half,
    whole,
)
from .sparse import Plan, Sparse

_SIGNIFICANCE = ("taylor", "fisher")


class MIPD(Sparse):
    r"""Significance from what all ranks know: which entries are sent needs no message at all.

    Implements the published idea of Zhang & Wang, *MIPD: An Adaptive Gradient Sparsification Framework for Distributed
    DNNs Training* (IEEE TPDS 33(11), 2022): the significance of a parameter comes from the model's interpretability,
    not from the gradient's size alone; layers are encoded one by one, by their distributions; half of the parameters
    are updated each step; exponential smoothing makes up for what was not sent. With weights w, the smoothed average
    gradient e (per step), and t steps since an entry was last sent, all of them equal on all ranks::

        s   = (|w| + floor rms(w)) (|e| + floor rms(e)) t       significance of what is waiting
        S   = the m largest s of every 256, in that half of the layer whose turn it is
        p   = compensation e                                    shared prediction, in that half
        g   = p + mean_i (a_i - p)[S] on S, p off it, 0 in the other half
        r_i = a_i - what was applied of it                      a wrong guess is paid back
        e   = smoothing e + (1 - smoothing) (what arrived / t)  on S

    The paper's: significance by interpretability, layer-wise budgets and encoding, half of the parameters a step,
    smoothing. Ours: |w e| (first-order attribution) as significance, from shared state; the factor t; halves as first
    and last blocks of a layer; the residual beside the smoothing; the codecs.

    Args:
        named_parameters: ``(name, parameter)`` pairs of the optimizer's parameters, as ``model.named_parameters()``.
        density: entries sent in a step as a share of all, in (0, 1], or a schedule. Above 1/2 there are no halves; a
            little under 1/2 fewer are sent, since a layer's smaller half has no more.
        values: how values travel: a name or a codec of :mod:`hvd_compress.codecs`. Lanes and Lloyd-Max codebooks fit
            each layer's distribution.
        layerwise: encode each layer by its own distribution; False takes a bucket for one (the rival that the paper
            argues against).
        significance: ``"taylor"``, |w e|, or ``"fisher"``, e^2.
        compensation: the share of the smoothed gradient that is applied where nothing was sent, in [0, 1].
        smoothing: weight of the past in e, in [0, 1).
        floor: the constant under |w| and |e|, in units of their root mean square; above 0.
        explore: share of blocks whose entries are drawn at random in proportion to significance, in [0, 1].
        budget_interval: steps between re-balancings of the layers' shares by significance (within 1/4 and 4 times the
            density, and among the layers of one bucket, whose total is constant: see ``bucket_mb``); 0 keeps the shares
            equal.
        warmup_steps, momentum: see :class:`~hvd_compress.IWP`.
        seed, min_numel, bucket_mb, dense_values, process_set, grad_scaler, collectives: see
            :class:`~hvd_compress.compressor.Compressor`.

    Raises:
        ValueError: an argument outside its range, or an optimizer with momentum beside ``momentum``.
        TypeError: ``named_parameters`` are not pairs, or a gradient is not of a floating dtype.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
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
        if not 0.0 <= compensation <= 1.0:
            raise ValueError(f"compensation must lie in [0, 1], got {compensation}")
        if not floor > 0.0:
            raise ValueError(f"floor must be above 0, got {floor}")
        check_explore(explore)
        super().__init__(
            named_parameters,
            density,
            values=values,
            layerwise=layerwise,
            budget_interval=budget_interval,
            warmup_steps=warmup_steps,
            momentum=momentum,
            **common,
        )
        self._significance, self._compensation, self._smoothing = significance, compensation, smoothing
        self._floor, self._explore = floor, explore
        self._floors: dict[int, tuple[Tensor, Tensor]] = {}
        #: Where the last step's guess was applied, bucket by bucket, to be undone.
        self._guessed: list[list[tuple[Part, Tensor]]] = [[] for _ in self._buckets]
        self._history = [History(bucket, smoothing) for bucket in self._buckets]

    def __repr__(self) -> str:
        return (
            f"MIPD(density {self._density}, {self._significance} significance, compensation {self._compensation:g}, "
            f"{self._codec.name} values{'' if self._layerwise else ' over whole buckets'}{self.momentum_text()}; "
            f"{self.parameters_text()})"
        )

    # A step's plan.

    def select(self, bucket: Bucket, plan: Plan, slots: list[int], density: float) -> Selection:
        return SharedSelection(bucket, slots, halves=density <= 0.5)

    def room(self, bucket: Bucket, plan: Plan, density: float) -> list[int]:
        return [smaller_half(s) if density <= 0.5 else s.numel for s in bucket.segments]

    def settings(self) -> tuple[Any, ...]:
        ours = self._significance, self._compensation, self._smoothing, self._floor, self._explore
        return *super().settings(), *ours

    def draw(self, bucket: Bucket, plan: Plan, turn: Turn, check: bool) -> None:
        super().draw(bucket, plan, turn, check)
        # Often at first, while the smoothed gradient takes shape.
        if bucket.index not in self._floors or self._step & (self._step - 1) == 0 or self._step % 64 == 0:
            self._floors[bucket.index] = self._measure(bucket)

    def _measure(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """``floor`` times the root mean squares of weights and smoothed gradients: float32, (segments,)."""
        weights, smoothed = root_mean_squares(bucket, flat_weights(bucket), bucket.state["smoothed"])
        return weights * self._floor, smoothed * self._floor

    def significance(self, bucket: Bucket, position: int, part: Part) -> Tensor:
        """Of some of a segment's entries, in memory order: float32, (entries,), the same bits on all ranks."""
        weights, smoothed = self._floors[bucket.index]
        weight = part.of(bucket.segments[position].parameter.detach())
        n = weight.numel()
        score = part.of_bucket(bucket.state["smoothed"])[:n].abs() + smoothed[position]
        if self._significance == "fisher":
            score.mul_(score)
        else:
            score.mul_(weight.float().abs() + weights[position])
        return score.mul_(self._step - part.of_bucket(bucket.state["last_sent"])[:n])

    def method_state(self) -> dict[str, Any]:
        return {**super().method_state(), "floors": {i: (w.clone(), e.clone()) for i, (w, e) in self._floors.items()}}

    def load_method_state(self, state: dict[str, Any]) -> None:
        super().load_method_state(state)
        self._floors = {
            i: (weights.to(self._buckets[i].device, copy=True), smoothed.to(self._buckets[i].device, copy=True))
            for i, (weights, smoothed) in state["floors"].items()
        }

    def importance(self, bucket: Bucket, plan: Plan) -> Tensor:
        parts = [self.significance(bucket, i, whole(segment)) for i, segment in enumerate(bucket.segments)]
        sums = [score.sum(dtype=torch.float64) for score in parts]
        return torch.stack(sums)

    # The algorithm.

    def communicate(self, bucket: Bucket, plan: Plan) -> Exchange:
        selection, state = _unled(plan), bucket.state
        if isinstance(selection, SharedSelection):
            for position, part in enumerate(selection.parts):
                selection.pick(position, self.significance(bucket, position, part), self._explore)
        yield from selection.agree(plan.rule)
        values, smoothed = selection.take(bucket.residual), selection.read(state["smoothed"])
        guess = smoothed * self._compensation
        key = derive(selection.turn.key, self._collectives.rank)
        mean, lost = yield from plan.channel.average(values - guess, plan.invalid, key)
        if self._compensation:
            self._apply_guess(bucket, plan, mean[:1].isfinite())
        targets = self.targets(bucket, plan)
        spared = selection.spare(targets, mean + guess)
        selection.put(targets, state.get("velocity"), Averages(spared, lost, self._scale))
        share = 0.5 if selection.halves else 1.0
        self._history[bucket.index].learn(selection, mean, self._step, smoothed * (share * self._compensation))
        plan.sent = True

    def _apply_guess(self, bucket: Bucket, plan: Plan, arrived: Tensor) -> None:
        """The guess stands for every entry whose turn it is; what was sent is then assigned over it."""
        for part, target in zip(_unled(plan).turns(), self.targets(bucket, plan), strict=True):
            if target.numel():
                guess = self._guess(bucket, part, arrived)
                part.of_bucket(bucket.residual).sub_(guess)
                here = part.of(target)
                here.copy_(guess[: here.numel()] * self._scale)
                self._guessed[bucket.index].append((part, arrived))

    def _guess(self, bucket: Bucket, part: Part, arrived: Tensor) -> Tensor:
        return (part.of_bucket(bucket.state["smoothed"]) * self._compensation).masked_fill_(~arrived, 0.0)

    def begin(self, bucket: Bucket) -> None:
        self._guessed[bucket.index] = []
        super().begin(bucket)

    def undo(self, bucket: Bucket) -> None:
        if self._plans[bucket.index].sent:
            # The smoothed gradient has changed only where something was sent, and there the residual is put back whole.
            for part, arrived in self._guessed[bucket.index]:
                part.of_bucket(bucket.residual).add_(self._guess(bucket, part, arrived))
            self._history[bucket.index].undo()
        super().undo(bucket)

    def restart(self, bucket: Bucket) -> None:
        super().restart(bucket)
        self._history[bucket.index].restart()


def _unled(plan: Plan) -> Unled:
    assert isinstance(plan.selection, Unled)
    return plan.selection
