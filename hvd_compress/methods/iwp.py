"""Importance-weighted pruning on ring allreduce (Cheng & Xu, arXiv 1901.01544)."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..engine.bucket import Bucket
from ..codecs import Codec
from ..selection.schedule import Density
from ..selection.base import LED, Rule, Selection, check_explore, check_leaders, leaders_text, run_length
from .sparse import Plan, Sparse

# Under this, a weight counts as zero; it only keeps an all-zero parameter's scores finite.
_TINY = 1e-12
# mean|w| drifts slowly: it is measured this often, in steps.
_FLOOR_INTERVAL = 100


class IWP(Sparse):
    r"""Importance-weighted pruning: every rank sends the same few entries, chosen by randomly drawn leaders.

    Implements the published idea of Cheng & Xu, *Bandwidth Reduction using Importance Weighted Pruning on Ring
    AllReduce* (arXiv 1901.01544): importance is the ratio of gradient to parameter, and the indices of important
    gradients are broadcast from randomly chosen nodes, so that the sum on the ring stays sparse. On rank i, with
    residual r and gradient g::

        a_i = r_i + g_i
        I   = |a_i| / (|w| + floor * mean|w|)             importance
        S   = union over leaders of their largest I        one allgather, one byte an index
        g   = mean_i a_i[S] on S, else 0                    Horovod's ring allreduce
        r_i = a_i - what was sent

    and the mean of every block of 256 gradients is taken out first and sent whole in every step (``block_means``).

    The paper's: the importance, the random leaders, the layer-wise budget, the ring. Ours: block-local choice (the m
    largest of every 256 entries), ``floor``, the random share, the blocks' means, everything counted in the wire ratio.

    Args:
        named_parameters: ``(name, parameter)`` pairs of the optimizer's parameters, as ``model.named_parameters()``.
        density: slots as a share of the entries, in (0, 1], or a schedule (:mod:`hvd_compress.schedule`): what is sent
            in a step. Where leaders pick the same entry, fewer different ones are.
        values: how values travel: a name or a codec of :mod:`hvd_compress.codecs`.
        selection: ``"block"`` (m of every 256, one byte an index) or ``"topk"`` (exact within a parameter, four
            bytes, slow).
        leaders: how many ranks, on average, choose the entries of one block; None for all.
        explore: share of the choices drawn at random in proportion to importance, in [0, 1].
        block_means: whether every block's mean goes ahead of its entries, for one value of 256 more. What entries
            have in common would otherwise arrive late and whole, and overshoot (:mod:`hvd_compress.means`).
        floor: the constant under the weights, in units of mean|w|; above 0.
        budget_interval: steps between re-balancings of the layers' shares by importance (within 1/4 and 4 times the
            density, and among the layers of one bucket, whose total is constant: see ``bucket_mb``); 0 keeps the shares
            equal.
        warmup_steps: steps over which density goes 1/4, 1/16, ... down to ``density``.
        momentum: momentum correction (u = momentum u + g enters the residual; sent entries of u are cleared), in [0,
            1). The optimizer's own momentum must then be 0, or it counts twice: :meth:`take_momentum` moves it here.
            Parameters that travel dense get plain momentum on their averaged gradient.
        seed, min_numel, bucket_mb, dense_values, process_set, grad_scaler, collectives: see
            :class:`~hvd_compress.compressor.Compressor`.

    Raises:
        ValueError: an argument outside its range, or an optimizer with momentum beside ``momentum``.
        TypeError: ``named_parameters`` are not pairs, or a gradient is not of a floating dtype.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        density: float | Density = 1 / 32,
        *,
        values: str | Codec = "lanes4",
        selection: str = "block",
        leaders: int | None = None,
        explore: float = 0.05,
        floor: float = 0.5,
        block_means: bool = True,
        budget_interval: int = 100,
        warmup_steps: int = 0,
        momentum: float = 0.0,
        **common: Any,
    ) -> None:
        if selection not in LED:
            raise ValueError(f"selection must be one of {', '.join(sorted(LED))}, got {selection!r}")
        check_leaders(leaders)
        check_explore(explore)
        if not floor > 0.0:
            raise ValueError(f"floor must be above 0, got {floor}")
        self._block_means = block_means
        super().__init__(
            named_parameters,
            density,
            values=values,
            budget_interval=budget_interval,
            warmup_steps=warmup_steps,
            momentum=momentum,
            **common,
        )
        self._selection, self._leaders, self._explore, self._floor = selection, leaders, explore, floor
        self._floors = [torch.zeros(len(b.segments), device=b.device) for b in self._buckets]

    def __repr__(self) -> str:
        return (
            f"IWP(density {self._density}, {self._selection} selection, {leaders_text(self._leaders)}, "
            f"{self._explore:.0%} random, {self._codec.name} values{self.momentum_text()}; {self.parameters_text()})"
        )

    def select(self, bucket: Bucket, plan: Plan, slots: list[int], density: float) -> Selection:
        ranks, rank = self._collectives.size, self._collectives.rank
        run = run_length(self._leaders, density, ranks)
        return LED[self._selection](bucket, slots, run, ranks, rank)

    def settings(self) -> tuple[Any, ...]:
        return *super().settings(), self._selection, self._leaders, self._explore, self._floor

    def rule(self, bucket: Bucket, plan: Plan) -> Rule:
        if self._step % _FLOOR_INTERVAL == 0:
            means = [segment.parameter.abs().mean(dtype=torch.float32) for segment in bucket.segments]
            self._floors[bucket.index] = torch.stack(means) * self._floor + _TINY
        floors = self._floors[bucket.index]
        fresh = plan.means.fresh if plan.means else None
        return replace(super().rule(bucket, plan), floors=floors, explore=self._explore, means=fresh)

    def importance(self, bucket: Bucket, plan: Plan) -> Tensor:
        sums = [plan.rule.score(bucket, i).sum(dtype=torch.float64) for i in range(len(bucket.segments))]
        return torch.stack(sums)

    def method_state(self) -> dict[str, Any]:
        floors = {
            segment.name: floor.clone()
            for bucket, floors in zip(self._buckets, self._floors, strict=True)
            for segment, floor in zip(bucket.segments, floors, strict=True)
        }
        return {**super().method_state(), "floors": floors}

    def load_method_state(self, state: dict[str, Any]) -> None:
        super().load_method_state(state)
        for bucket in self._buckets:
            floors = [state["floors"][segment.name].to(bucket.device) for segment in bucket.segments]
            self._floors[bucket.index] = torch.stack(floors)
