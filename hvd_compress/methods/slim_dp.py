"""Explore and exploit: a core of significant entries, and random ones of the others (Sun et al., arXiv 1709.09393)."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..codecs import Codec
from ..engine.arguments import NamedParameters, check_fraction
from ..engine.bucket import Bucket
from ..engine.exchange import Exchange
from ..engine.rng import derive
from ..engine.state import Tree
from ..hosts.ddp import DDPHost
from ..reference import flat_positions
from ..selection.base import Selection
from ..selection.history import GradientHistory, flat_weights, root_mean_squares
from ..selection.schedule import Density
from ..selection.shared import ScoredSelection, SharedSelection
from .local_steps import LocalSteps
from .sparse import Plan, SparseMethod

# Entries are drawn in proportion to their chance. With this one an entry is always drawn: a draw divides by a number
# between 2**-33 and 23.
_CORE = 1e20


class SlimDP(SparseMethod):
    r"""Slim-DP: significant entries (the core) are sent in every step, and a random part of the others (the explorer).

    Implements Sun, Chen, Bian, Liu & Liu, *Slim-DP: A Light Communication Data Parallelism for DNN* (arXiv 1709.09393;
    AAMAS 2018). Core and explorer are computed from shared state, so no indices are sent. With weights w
    and the smoothed average gradient e (per step)::

        s   = |w| / rms(w) + gradient_weight |e| / rms(e)       every ``reselect`` steps
        C   = the largest s: a share ``core`` of the slots of every 256 entries
        E   = random others in the remaining slots, drawn in each step
        S   = C + E
        g   = mean_i a_i[S] on S, 0 elsewhere                   a_i = r_i + g_i
        r_i = a_i - what was sent

    The paper's: core and explorer, significance by magnitude and gradient, re-selection. Ours: no indices, the residual
    (the paper's workers continue from their own parameters: ``mode="local"``), block-local selection, the codecs.

    ``mode="local"``: every rank takes ``period`` local steps; then the differences to the last common parameters are
    averaged on S, and each rank keeps the rest of its own difference. It wraps the optimizer and needs no host hook::

        compression = hvd_compress.SlimDP(model.named_parameters(), mode="local", period=8)
        optimizer = compression.wrap(torch.optim.SGD(...))       # no DistributedOptimizer, no DistributedDataParallel
        ...
        compression.finish()                                     # a full average, before testing or saving

    All ranks must then take equally many steps: if one skips a step (a ``GradScaler`` of its own) or has fewer batches,
    the others wait for it.

    Args:
        density: entries sent in a step as a share of all (the paper's alpha), in (0, 1], or a schedule.
        core: the core's share of them (the paper's beta / alpha), in [0, 1].
        values: how values are encoded: the name of a codec or a codec (:mod:`hvd_compress.codecs`).
        reselect: steps between selections of the core.
        gradient_weight: weight of the gradient in the significance; 0 uses the parameters only.
        smoothing: weight of the past in e, in [0, 1).
        mode: ``"gradient"`` or ``"local"``.
        period: local steps between two exchanges.
        budget_interval: exchanges between updates of the parameters' shares of a bucket's slots by significance; 0
            keeps them equal.
        warmup_steps, momentum: see :class:`~hvd_compress.IWP`. No momentum for ``mode="local"``, where it stays in the
            optimizer.
        Others, and errors: see :class:`~hvd_compress.Compressor`.

    Raises:
        RuntimeError: ``mode="local"`` used with Horovod's optimizer or as a DDP hook.
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
        mode: str = "gradient",
        period: int = 1,
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
        if mode not in ("gradient", "local"):
            raise ValueError(f"mode must be gradient or local, got {mode!r}")
        if period < 1 or (period > 1 and mode == "gradient"):
            raise ValueError(f'period must be at least 1, and 1 in mode="gradient", got {period}')
        if mode == "local" and common.get("dense_values", "fp32") != "fp32":
            raise ValueError('mode="local" averages what is not compressed in fp32: leave dense_values out')
        if mode == "local" and (momentum or common.get("grad_scaler") is not None):
            raise ValueError('mode="local" averages parameters: momentum and grad_scaler stay with the optimizer')
        common.update(values=values, budget_interval=budget_interval, warmup_steps=warmup_steps, momentum=momentum)
        super().__init__(named_parameters, density, **common)
        self._core, self._reselect, self._gradient_weight = core, reselect, gradient_weight
        self._smoothing = smoothing
        self._history = [GradientHistory(bucket, smoothing) for bucket in self.buckets]
        for bucket in self.buckets:
            bucket.add_state("chance", low=1.0).fill_(1.0)
        self._local = LocalSteps(self, period) if mode == "local" else None

    # Selection.

    def select(self, bucket: Bucket, plan: Plan, slots: list[int], density: float) -> Selection:
        return ScoredSelection(bucket, slots, halves=False)

    def significance(self, bucket: Bucket) -> list[Tensor]:
        """The significance of each segment's entries, in memory order: float32, (entries,), the same bits on all
        ranks."""
        weights = self._local.anchors(bucket) if self._local else flat_weights(bucket)
        smoothed = bucket.state["smoothed"]
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

    def targets(self, bucket: Bucket, plan: Plan) -> list[Tensor]:
        return self._local.targets(bucket) if self._local else super().targets(bucket, plan)

    def undo(self, bucket: Bucket) -> None:
        if self._plans[bucket.index].sent:
            self._history[bucket.index].undo()
        super().undo(bucket)

    def restart(self, bucket: Bucket) -> None:
        super().restart(bucket)
        self._history[bucket.index].restart()
        bucket.state["chance"].fill_(1.0)
        if self._local:
            self._local.restart()

    # Local steps.

    def wrap(self, optimizer: Optimizer) -> Optimizer:
        """For ``mode="local"``: makes ``optimizer`` exchange after every ``period`` steps, and returns it. All ranks
        must start with the same parameters (``hvd.broadcast_parameters``).

        Raises ``ValueError`` in another mode, or if it holds none of the parameters.
        """
        return self._in_local_mode("wrap").wrap(optimizer)

    def finish(self) -> None:
        """For ``mode="local"``: averages all parameters over the ranks, before evaluation or saving. All ranks must
        call it. Raises ``ValueError`` in another mode."""
        self._in_local_mode("finish").finish()

    def _in_local_mode(self, what: str) -> LocalSteps:
        if self._local is None:
            raise ValueError(f'{what}() is for mode="local"; in mode="gradient" the host averages')
        return self._local

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        self._refuse_gradients()
        return super().compress(tensor)

    @property
    def ddp_host(self) -> DDPHost:
        self._refuse_gradients()
        return super().ddp_host

    def _refuse_gradients(self) -> None:
        if self._local is not None:
            raise RuntimeError(
                'mode="local" averages parameters, not gradients: use compression.wrap(optimizer) instead of '
                "hvd.DistributedOptimizer or DistributedDataParallel"
            )

    def take_momentum(self, optimizer: Optimizer) -> float:
        if self._local is not None:
            raise ValueError('take_momentum: in mode="local" momentum stays in the optimizer')
        return super().take_momentum(optimizer)

    def built_with(self) -> dict[str, Any]:
        return {**super().built_with(), "mode": "local" if self._local else "gradient"}

    def method_state(self) -> dict[str, Tree]:
        return {**super().method_state(), "local": self._local.state() if self._local else {}}
