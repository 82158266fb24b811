"""Explore and exploit: a core of significant entries, and random ones of the others (Sun et al., arXiv 1709.09393)."""

from typing import Any

import torch
from torch import Tensor

from ..codecs import Codec
from ..engine.arguments import NamedParameters, check_fraction
from ..engine.bucket import Bucket
from ..engine.exchange import Exchange
from ..engine.rng import derive
from ..reference import flat_positions
from ..selection.base import Selection
from ..selection.history import GradientHistory, flat_weights, root_mean_squares
from ..selection.schedule import Density
from ..selection.shared import ScoredSelection, SharedSelection
from .sparse import Plan, SparseMethod

# Entries are drawn in proportion to their chance. With this one an entry is always drawn: a draw divides by a number
# between 2**-33 and 23.
_CORE = 1e20


class SlimDP(SparseMethod):
    r"""Slim-DP: significant entries (the core) are sent in every step, and a random part of the others (the explorer).

    Implements the published idea of Sun, Chen, Bian, Liu & Liu, *Slim-DP: A Light Communication Data Parallelism for
    DNN* (arXiv 1709.09393; AAMAS 2018). On rank i, for one parameter with gradient g_i and residual r_i; weights w and
    smoothed average gradient e (per step) are equal on all ranks::

        a_i = r_i + g_i                                         with momentum u_i instead of g_i, as in IWP
        s   = |w| / rms(w) + gradient_weight |e| / rms(e)       every ``reselect`` steps
        C   = the largest s of every 256: a share ``core`` of their slots
        E   = random others of the 256 in the remaining slots, drawn in each step
        S   = C + E
        g   = mean_i Q(a_i[S]) on S, 0 elsewhere                Q: the codec
        r_i = a_i - Q(a_i[S]) on S, a_i elsewhere
        e   = smoothing e + (1 - smoothing) (received value / steps since the entry was last sent)   on S

    The paper's: a core by magnitude and gradient (the formula is ours), a random explorer. Re-selection is of later
    literature. Ours: core and explorer from state and seed that all ranks share, so that no indices are sent; the m
    largest of every 256, which may leave out a significant entry whose block is full; the residual. The paper's workers
    take several steps, exchange parameters and continue from their own: :class:`~hvd_compress.LocalSteps` does so here.

    In each step the ranks compare a hash of seed, step, options and selection, and raise an error if they differ (on a
    GPU in every hundredth step).

    Args:
        density: entries sent in a step as a share of all (the paper's alpha), in (0, 1], or a schedule.
        core: the core's share of them (the paper's beta / alpha), in [0, 1].
        values: how values are encoded: the name of a codec or a codec (:mod:`hvd_compress.codecs`).
        reselect: steps between selections of the core.
        gradient_weight: weight of the gradient in the significance; 0 uses the parameters only.
        smoothing: weight of the past in e, in [0, 1).
        budget_interval: exchanges between updates of the parameters' shares of a bucket's slots by significance; 0
            keeps them equal.
        warmup_steps, momentum: see :class:`~hvd_compress.IWP`.

    Other arguments, and errors: see :class:`~hvd_compress.Compressor`.
    """

    def __init__(
        self,
        named_parameters: NamedParameters,
        density: float | Density = 1 / 32,
        *,
        core: float = 0.5,
        values: str | Codec = "lanes4",
        reselect: int = 20,
        gradient_weight: float = 1.0,
        smoothing: float = 0.9,
        budget_interval: int = 0,
        warmup_steps: int = 0,
        momentum: float = 0.0,
        **common: Any,
    ) -> None:
        check_fraction("core", core)
        if reselect < 1:
            raise ValueError(f"reselect must be at least 1, got {reselect}")
        if not gradient_weight >= 0.0:
            raise ValueError(f"gradient_weight must not be negative, got {gradient_weight}")
        common.update(values=values, budget_interval=budget_interval, warmup_steps=warmup_steps, momentum=momentum)
        super().__init__(named_parameters, density, **common)
        self._core, self._reselect, self._gradient_weight = core, reselect, gradient_weight
        self._smoothing = smoothing
        self._history = [GradientHistory(bucket, smoothing) for bucket in self.buckets]
        for bucket in self.buckets:
            bucket.add_state("chance", low=1.0).fill_(1.0)

    # Selection.

    def select(self, bucket: Bucket, plan: Plan, slots: list[int], density: float) -> Selection:
        return ScoredSelection(bucket, slots, halves=False)

    def significance(self, bucket: Bucket) -> list[Tensor]:
        """The significance of each segment's entries, in memory order: float32, (entries,), the same bits on all
        ranks."""
        weights, smoothed = flat_weights(bucket), bucket.state["smoothed"]
        of_weights, of_gradients = root_mean_squares(bucket, weights, smoothed)
        scores = []
        for position, (segment, weight) in enumerate(zip(bucket.segments, weights, strict=True)):
            gradient = segment.of(smoothed)[: segment.numel].abs() / of_gradients[position]
            scores.append(weight.abs() / of_weights[position] + gradient * self._gradient_weight)
        return scores

    def importance(self, bucket: Bucket, plan: Plan) -> Tensor:
        return torch.stack([score.sum(dtype=torch.float64) for score in self.significance(bucket)])

    def begin(self, bucket: Bucket) -> None:
        super().begin(bucket)
        selection = self._plans[bucket.index].selection
        # Blocks keep their slots as long as their core: with fewer, the core would not fit.
        since = self.step - self.step % self._reselect
        selection.phase = derive(self.engine.seed, since, bucket.index) & 0xFFFF
        if since == self.step and isinstance(selection, ScoredSelection):
            self._choose_core(bucket, selection)

    def _choose_core(self, bucket: Bucket, selection: ScoredSelection) -> None:
        core = ScoredSelection(bucket, [round(slots * self._core) for slots in selection.slots], halves=False)
        core.begin_step(selection.seed, False)
        core.phase = selection.phase
        for position, score in enumerate(self.significance(bucket)):
            core.select(position, score, 0.0)
        bucket.state["chance"].fill_(1.0)
        bucket.state["chance"][flat_positions(core.indices, core.rows, core.phase)] = _CORE

    def exchange_values(self, bucket: Bucket, plan: Plan) -> Exchange:
        selection = plan.selection
        assert isinstance(selection, SharedSelection)
        if isinstance(selection, ScoredSelection):
            for position, segment in enumerate(bucket.segments):
                # All drawn at random, without replacement, in proportion to the chance.
                selection.select(position, segment.of(bucket.state["chance"])[: segment.numel], 1.0)
        yield from super().exchange_values(bucket, plan)
        self._history[bucket.index].update(selection, plan.channel.mean, self.step)

    def undo(self, bucket: Bucket) -> None:
        if self._plans[bucket.index].sent:
            self._history[bucket.index].undo()
        super().undo(bucket)

    def restart(self, bucket: Bucket) -> None:
        super().restart(bucket)
        self._history[bucket.index].restart()
        bucket.state["chance"].fill_(1.0)
