"""The base class of methods that send a few entries of the residual in each step."""

import abc
import math
from collections import ChainMap
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..codecs import Channel, Codec, codec
from ..engine.arguments import NamedParameters
from ..engine.block_means import BlockMeans
from ..engine.bucket import Bucket, Segment, strides_of
from ..engine.collectives import allreduce
from ..engine.configuration import digest
from ..engine.exchange import Exchange
from ..engine.momentum import MomentumCorrection
from ..engine.rng import derive
from ..engine.state import Entry, Fixed, Foreign, Tree
from ..selection.base import Average, Output, Scoring, Selection, StepSeed, missing_targets
from ..selection.budget import SPREAD, apportion, shares
from ..selection.leaders import LeaderSelection
from ..selection.per_rank import PerRankSelection, average_per_rank
from ..selection.schedule import Density, WarmUp, check_density
from ..selection.shared import AllEntries
from .adam_advice import warn_of_adam
from .base import Compressor
from .plan import Plan

# On a GPU, ranks check every so many steps whether they have selected alike.
_CHECK_INTERVAL = 100


class SparseMethod(Compressor):
    """A method that sends a few entries of the residual; a subclass says which.

    Args:
        density: slots as a share of the entries, in (0, 1], or a schedule (:mod:`hvd_compress.schedule`).
        values: a codec's name or a codec (:mod:`hvd_compress.codecs`).
        layerwise: one quantization scale per parameter, or one per bucket.
        budget_interval: steps between updates of the parameters' shares of a bucket's slots; 0 keeps them equal.
        warmup_steps: steps over which the density decreases 1/4, 1/16, ... to ``density``.
        momentum: of momentum correction, in [0, 1); see :meth:`take_momentum`.
    """

    #: Whether block means are sent (:mod:`hvd_compress.engine.block_means`); only with selections by leaders.
    _block_means = False
    #: Whether a parameter that no rank has a gradient for receives nothing, instead of the rest of its residual.
    _finds_idle = False
    #: A hash of the options in this step.
    _settings: int

    def __init__(
        self,
        named_parameters: NamedParameters,
        density: float | Density,
        *,
        values: str | Codec,
        layerwise: bool = True,
        budget_interval: int = 0,
        warmup_steps: int = 0,
        momentum: float = 0.0,
        **common: Any,
    ) -> None:
        if isinstance(density, Density) and warmup_steps:
            raise ValueError("warmup_steps goes with a density that is a number, not with a schedule")
        if not isinstance(density, Density | int | float):
            raise TypeError(f"density must be a number or a schedule (hvd_compress.schedule), got {density!r}")
        self._density = density if isinstance(density, Density) else WarmUp(density, warmup_steps)
        self._codec = codec(values)
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum must lie in [0, 1), got {momentum}")
        if budget_interval < 0:
            raise ValueError(f"budget_interval must not be negative, got {budget_interval}")
        super().__init__(named_parameters, **common)
        self.momentum = MomentumCorrection(self.engine, momentum)
        self._layerwise, self._budget_interval = layerwise, budget_interval
        self._plans = [Plan(b, self._channel(b), BlockMeans(b) if self._block_means else None) for b in self.buckets]
        self.momentum.other_velocities = [p.block_means.velocity for p in self._plans if p.block_means]

    # What a method says.

    @abc.abstractmethod
    def select(self, bucket: Bucket, plan: Plan, slots: list[int], density: float) -> Selection:
        """A selection with so many slots for each parameter."""

    def scoring(self, bucket: Bucket, plan: Plan) -> Scoring:
        """How entries are scored in this step; by default by magnitude."""
        return Scoring(None, 0.0, 1.0 / self.scale, self.momentum.value, plan.invalid, plan.disagree)

    def output(self) -> Output:
        """How averages become gradients; by default times the loss scale."""
        return Output(self.scale)

    def importance(self, bucket: Bucket, plan: Plan) -> Tensor:
        """The sum of each parameter's scores on this rank, for its share of the slots: float64, (segments,)."""
        sums = [plan.scoring.score(bucket, i).sum(dtype=torch.float64) for i in range(len(bucket.segments))]
        return torch.stack(sums)

    def max_slots(self, bucket: Bucket, plan: Plan, density: float) -> list[int]:
        """The most slots that each parameter can have."""
        return plan.sizes

    def options(self) -> dict[str, Any]:
        # A density that is a number is among the base class's options.
        return {"density": self._density, **super().options(), "values": self._codec, **self.momentum.options()}

    @property
    def linear(self) -> bool:
        return not self.momentum.value

    def targets(self, bucket: Bucket, plan: Plan) -> list[Tensor]:
        """What averages are written to: one tensor per segment, empty where no gradient arrived."""
        return bucket.targets()

    # A step.

    def begin(self, bucket: Bucket) -> None:
        if bucket.index == 0:  # the step's first: options may have changed since the last one
            self._settings = digest({"method": type(self).__name__, **self.options()})
        plan = self._plans[bucket.index]
        density = self._density(self.step)
        check_density(density)
        layout = (density, self.ranks, self.rank, tuple(plan.weights))
        if plan.layout != layout:
            self._lay_out(bucket, plan, density)
            plan.layout = layout
        plan.invalid.zero_()
        plan.channel.begin_step()
        plan.scoring = self.scoring(bucket, plan)
        # Free on the CPU; on a GPU it synchronises, so only now and then.
        check = bucket.device.type == "cpu" or plan.unchecked or self.step % _CHECK_INTERVAL == 0
        seed = StepSeed.draw(self.engine.seed, self.step, bucket.index, self.ranks, self._settings)
        plan.selection.begin_step(seed, check)
        plan.sent, plan.unchecked = False, False

    def _channel(self, bucket: Bucket) -> Channel:
        groups = len(bucket.segments) if self._layerwise else 1
        groups += len(bucket.segments) if self._block_means else 0
        return self._codec.channel(groups, self.ranks, self.rank, bucket.device)

    def _lay_out(self, bucket: Bucket, plan: Plan, density: float) -> None:
        # At least one slot for each parameter: without one it would never be sent.
        total = max(len(plan.sizes), round(density * sum(plan.sizes)))
        if total == sum(plan.sizes):
            plan.selection = AllEntries(bucket, self._finds_idle)
        else:
            slots = apportion(total, plan.weights, self.max_slots(bucket, plan, density))
            plan.selection = self.select(bucket, plan, slots, density)
        means = plan.block_means
        assert means is None or isinstance(plan.selection, LeaderSelection | AllEntries), "others ignore block means"
        total, slots = plan.selection.total, plan.selection.slots
        plan.payload = torch.empty(total + (bucket.blocks if means else 0), dtype=torch.float32, device=bucket.device)
        plan.selection.values = plan.payload[:total]
        counts = slots if self._layerwise else [sum(slots)]
        plan.channel.set_group_sizes([*counts, *(segment.blocks for segment in bucket.segments if means)])

    def receive(self, bucket: Bucket, position: int, grad: Tensor) -> None:
        plan = self._plans[bucket.index]
        plan.selection.accumulate(position, grad, self.momentum.velocity(bucket, position), plan.scoring)

    def exchange(self, bucket: Bucket) -> Exchange:
        plan, interval = self._plans[bucket.index], self._budget_interval
        update_shares = interval > 0 and self.step % interval == interval - 1
        importance = self.importance(bucket, plan) if update_shares else None
        yield from self.exchange_values(bucket, plan)
        if importance is not None:
            # Summed over ranks, so that every rank computes its slots from the same bits.
            agreed = yield allreduce(importance.nan_to_num_(nan=0.0, posinf=0.0), "budget", "shares")
            plan.weights = shares(agreed.tolist(), plan.sizes)

    def exchange_values(self, bucket: Bucket, plan: Plan) -> Exchange:
        """The algorithm: agree on the entries, average their values, write the averages."""
        if isinstance(plan.selection, PerRankSelection):
            targets, velocity = self.targets(bucket, plan), bucket.state.get("velocity")
            arguments = (plan.channel, plan.scoring, targets, velocity, self.output())
            yield from average_per_rank(plan.selection, *arguments)
            plan.sent = True
            return
        selection, means = plan.selection, plan.block_means
        yield from selection.agree(plan.scoring)
        selection.gather(bucket.residual)
        if means is not None:
            for segment in self.momentum.without(bucket):
                segment.of_blocks(means.velocity).zero_()
            means.load(plan.payload[selection.total :], self.momentum.value, plan.invalid)
        key = derive(selection.seed.key, self.rank)
        mean, error = yield from plan.channel.average(plan.payload, plan.invalid, key)
        plan.sent = True
        block_means, targets = None, self.targets(bucket, plan)
        if means is not None:
            mean, block_means = torch.split(mean, [selection.total, bucket.blocks])
            error, rest = torch.split(error, [selection.total, bucket.blocks])
            for position in missing_targets(targets):  # as Selection.skip_missing()
                bucket.segments[position].of_blocks(block_means).fill_(math.nan)
            means.keep_error(block_means, rest)
        mean, error = selection.keep_idle(mean, error)
        self.averaged(bucket, plan, mean)
        mean, velocity = selection.skip_missing(targets, mean), bucket.state.get("velocity")
        selection.scatter(targets, velocity, Average(mean, error, self.output(), block_means))

    def averaged(self, bucket: Bucket, plan: Plan, mean: Tensor) -> None:
        """Called by :meth:`exchange_values` with the averages, float32, (slots,), before they are written."""

    def undo(self, bucket: Bucket) -> None:
        plan = self._plans[bucket.index]
        plan.channel.undo_step()
        if not plan.sent:
            return
        # A mean of 0 with the sent values as quantization error: they return to the residual, no gradient is written.
        sent = plan.selection.values
        average = Average(torch.zeros_like(sent), sent, Output(0.0))
        plan.selection.scatter(bucket.no_targets(), bucket.state.get("velocity"), average)
        if plan.block_means is not None:
            plan.block_means.undo(plan.payload[plan.selection.total :])
        plan.sent = False

    def invalidate(self, bucket: Bucket, bad: Tensor) -> None:
        """If ``bad``, bool, (), this step's averages will be NaN on all ranks."""
        self._plans[bucket.index].invalid |= bad.to(torch.int32)

    def restart(self, bucket: Bucket) -> None:
        plan = self._plans[bucket.index]
        plan.restart()
        plan.channel = self._channel(bucket)
        self._density.restart()
        self.momentum.restart()

    # Momentum.

    def take_momentum(self, optimizer: Optimizer) -> float:
        """Moves the momentum of a ``torch.optim.SGD`` into this compressor, as momentum correction. Returns it.

        Call it on the optimizer that is given to Horovod or that steps the DDP model, with one synchronised backward
        pass per step. The parameters that this optimizer holds then have their momentum here, those of other optimizers
        do not: take it from every optimizer that has one, with equal momenta. Velocities that the optimizer has already
        are carried over. Weight decay stays in the optimizer, without momentum there, and is scaled by 1 / (1 -
        momentum) to keep its effect. :meth:`return_momentum` undoes this. A learning-rate schedule that changes the
        momentum (OneCycleLR) raises an error in the next step. With one process, or outside the process set, where
        Horovod calls no compressor, the momentum stays in the optimizer; if a process set leaves ranks out, call
        ``hvd.broadcast_optimizer_state()`` before: afterwards the states of the ranks differ.

        Raises:
            TypeError: another optimizer: its momentum is something else.
            ValueError: no momentum, different ones in different groups, Nesterov or dampening, or parameters that were
                not given to this compressor and would lose their momentum; in the optimizer's step, parameters whose
                gradients bypass this compressor.
        """
        return self.momentum.take(optimizer)

    def return_momentum(self, optimizer: Optimizer) -> float:
        """Moves the momentum and the velocities back to ``optimizer``, from which they were taken. Returns the
        momentum. All ranks must call it, after a step: velocities are averaged over them. Raises ``ValueError`` if
        there is none, or between an average and its step."""
        return self.momentum.give_back(optimizer)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        self.momentum.check(optimizer)
        super().check_optimizer(optimizer)
        warn_of_adam(self.engine, optimizer, any(plan.sparse for plan in self._plans))

    def dense_averaged(self, number: int, grad: Tensor) -> None:
        self.momentum.dense_averaged(number, grad)

    def passed(self, tensor: Tensor) -> Tensor:
        self.momentum.check_sparse(tensor)
        return super().passed(tensor)

    # Residuals and checkpoints.

    def entries(self, segment: Segment, part: Tensor) -> Tensor:
        """A segment's part of a bucket-wide state, (blocks * 256,), as entries of the parameter, in its shape; a view
        or a copy. A method that keeps coefficients of a transform applies the inverse."""
        return segment.reshaped(part)

    def coefficients(self, segment: Segment, entries: Tensor, part: Tensor) -> None:
        """The inverse of :meth:`entries`: writes ``part``."""
        segment.reshaped(part).copy_(entries)

    def held(self, bucket: Bucket, segment: Segment) -> Tensor:
        entries, means = self.entries(segment, bucket.residual_of(segment)), self._plans[bucket.index].block_means
        if means is None:
            return entries
        return entries + segment.reshaped(means.spread(segment, means.unsent + means.fresh))

    def velocity_of(self, bucket: Bucket, segment: Segment) -> Tensor:
        """The velocity of a parameter, in its shape: float32."""
        entries = self.entries(segment, segment.of(bucket.state["velocity"]))
        means = self._plans[bucket.index].block_means
        return entries if means is None else entries + segment.reshaped(means.spread(segment, means.velocity))

    def set_velocity(self, bucket: Bucket, segment: Segment, velocity: Tensor) -> None:
        """Replaces it."""
        self.coefficients(segment, velocity, segment.of(bucket.state["velocity"]))
        if (means := self._plans[bucket.index].block_means) is not None:
            segment.of_blocks(means.velocity).zero_()

    def scale_residual(self, bucket: Bucket, factor: float) -> None:
        super().scale_residual(bucket, factor)
        if (means := self._plans[bucket.index].block_means) is not None:
            means.unsent.mul_(factor)

    def depends_on_memory_order(self) -> bool:
        """Whether the state depends on the order in which parameters lie in memory."""
        return self._block_means

    def built_with(self) -> dict[str, Any]:
        """The options that a state depends on, by the name under which an error reports a difference."""
        strides = {p.segment.name: list(strides_of(p.segment.parameter)) for p in self.engine.places}
        return {
            "block means": self._block_means,
            "strides (use the same memory_format)": strides if self.depends_on_memory_order() else None,
            "values": self._codec.name,
            "layerwise": self._layerwise,
            "density schedule": type(self._density).__name__,
            "buckets (bucket_mb)": [[segment.name for segment in bucket.segments] for bucket in self.buckets],
        }

    def method_state(self) -> dict[str, Tree]:
        state: dict[str, Tree] = {
            "made_with": {what: Fixed(value) for what, value in self.built_with().items()},
            **self.momentum.state(),
            "density": Foreign(self._density),
            "channels": {str(bucket.index): self._plans[bucket.index].channel.state() for bucket in self.buckets},
            "weights": {
                segment.name: Entry(plan.weights, i, float, segment.numel / SPREAD, segment.numel * SPREAD)
                for bucket, plan in zip(self.buckets, self._plans, strict=True)
                for i, segment in enumerate(bucket.segments)
            },
        }
        means = [plan.block_means.state() for plan in self._plans if plan.block_means]
        return {**state, "block_means": dict(ChainMap(*means))}
