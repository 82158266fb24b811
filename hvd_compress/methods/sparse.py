"""What all methods share that send a few entries a step: residual, density, layers' shares, codec, momentum."""

import abc
import math
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..engine.bucket import Bucket, Segment
from ..selection.budget import apportion, shares
from ..codecs import Channel, Codec, codec
from ..engine.collectives import allreduce
from ..engine.exchange import Exchange
from ..engine.block_means import BlockMeans
from ..engine.momentum import MomentumCorrected
from ..engine.rng import derive
from ..selection.schedule import Density, WarmUp, check_density
from ..selection.base import Averages, Everything, Led, Rule, Selection, Turn, missing

# On a GPU the ranks' agreement is looked at this often, in steps.
_CHECK_INTERVAL = 100


class Plan:
    """One bucket's share of the method: how many slots each parameter has now, and what was drawn for this step."""

    def __init__(self, bucket: Bucket, channel: Channel, means: BlockMeans | None) -> None:
        self.channel = channel
        self.means = means
        self.sizes = [segment.numel for segment in bucket.segments]
        self.invalid = torch.zeros(1, dtype=torch.int32, device=bucket.device)
        self.unlike = torch.zeros(1, dtype=torch.bool, device=bucket.device)
        #: Whether the last step's values were taken: then the selection still has them.
        self.sent = False
        self.selection: Selection
        self.rule: Rule
        #: What goes out: the selection's values, then the blocks' means.
        self.message: Tensor
        self.forget()

    def forget(self) -> None:
        """Nothing is agreed on with the other ranks."""
        self.weights = [float(size) for size in self.sizes]
        self.shape: tuple[object, ...] = ()
        self.unchecked, self.sent = True, False
        self.unlike.zero_()


class Sparse(MomentumCorrected):
    """A method that sends a few entries of the residual; a subclass says which.

    Args:
        density: slots as a share of the entries, in (0, 1], or a schedule (:mod:`hvd_compress.schedule`).
        values: how values travel (:mod:`hvd_compress.codecs`).
        layerwise: a scale for each parameter's values, or one for the bucket.
        budget_interval: steps between re-balancings of the shares of a bucket's layers; 0 keeps them equal.
        warmup_steps: steps over which density goes 1/4, 1/16, ... down to ``density``.
    """

    #: Whether the mean of every block is sent in every step (:mod:`hvd_compress.means`). A method that offers it says
    #: so before it calls this constructor, and selects by leaders.
    _block_means = False

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        density: float | Density,
        *,
        values: str | Codec,
        layerwise: bool = True,
        budget_interval: int,
        warmup_steps: int,
        **common: Any,
    ) -> None:
        if isinstance(density, Density) and warmup_steps:
            raise ValueError("warmup_steps goes with a density that is a number, not with a schedule")
        if not isinstance(density, Density | int | float):
            raise TypeError(f"density must be a number or a schedule (hvd_compress.schedule), got {density!r}")
        self._density = density if isinstance(density, Density) else WarmUp(density, warmup_steps)
        self._codec = codec(values)
        if budget_interval < 0:
            raise ValueError(f"budget_interval must not be negative, got {budget_interval}")
        super().__init__(named_parameters, **common)
        self._layerwise, self._budget_interval = layerwise, budget_interval
        self._plans = [
            Plan(bucket, self._channel(bucket), BlockMeans(bucket) if self._block_means else None)
            for bucket in self._buckets
        ]

    # What a method says.

    @abc.abstractmethod
    def select(self, bucket: Bucket, plan: Plan, slots: list[int], density: float) -> Selection:
        """A selection of so many slots for each parameter."""

    def rule(self, bucket: Bucket, plan: Plan) -> Rule:
        """How entries are scored in this step: by |residual|, where gradients as they come are scored at all."""
        return Rule(None, 0.0, 1.0 / self._scale, self._momentum, plan.invalid, plan.unlike)

    @abc.abstractmethod
    def importance(self, bucket: Bucket, plan: Plan) -> Tensor:
        """Each parameter's summed importance on this rank: float64, (segments,)."""

    def room(self, bucket: Bucket, plan: Plan, density: float) -> list[int]:
        """The most slots that each parameter can have."""
        return plan.sizes

    def settings(self) -> tuple[Any, ...]:
        """What must be the same on all ranks, beside seed, step and slots: they compare it."""
        name = type(self).__name__
        return name, self._codec, self._layerwise, self._block_means, self._budget_interval, self._momentum

    def targets(self, bucket: Bucket, plan: Plan) -> list[Tensor]:
        """What the averages are assigned to, one tensor a segment, empty where there is none."""
        empty = torch.empty(0, device=bucket.device)
        return [empty if grad is None else grad for grad in bucket.gradients]

    # A step.

    def begin(self, bucket: Bucket) -> None:
        plan = self._plans[bucket.index]
        ranks, rank = self._collectives.size, self._collectives.rank
        density = self._density(self._step)
        check_density(density)
        shape = (density, ranks, rank, tuple(plan.weights))
        if plan.shape != shape:
            self._lay_out(bucket, plan, density)
            plan.shape = shape
        plan.invalid.zero_()
        plan.channel.mark()
        plan.rule = self.rule(bucket, plan)
        # On the CPU a look costs nothing; a GPU would be waited for, so there only now and then.
        check = bucket.device.type == "cpu" or plan.unchecked or self._step % _CHECK_INTERVAL == 0
        settings = zlib.crc32(repr(self.settings()).encode())
        self.draw(bucket, plan, Turn.draw(self._seed, self._step, bucket.index, ranks, settings), check)
        plan.sent, plan.unchecked = False, False

    def draw(self, bucket: Bucket, plan: Plan, turn: Turn, check: bool) -> None:
        """The selection's step begins."""
        plan.selection.begin(turn, check)

    def _channel(self, bucket: Bucket) -> Channel:
        groups = len(bucket.segments) if self._layerwise else 1
        groups += len(bucket.segments) if self._block_means else 0
        return self._codec.channel(groups, self._collectives.size, self._collectives.rank, bucket.device)

    def _lay_out(self, bucket: Bucket, plan: Plan, density: float) -> None:
        # A parameter without a slot would wait for ever.
        total = max(len(plan.sizes), round(density * sum(plan.sizes)))
        if total == sum(plan.sizes):
            plan.selection = Everything(bucket)
        else:
            slots = apportion(total, plan.weights, self.room(bucket, plan, density))
            plan.selection = self.select(bucket, plan, slots, density)
        assert plan.means is None or isinstance(plan.selection, Led | Everything), "others put no blocks' means"
        total, slots = plan.selection.total, plan.selection.slots
        plan.message = torch.empty(total + (bucket.blocks if plan.means else 0), device=bucket.device)
        plan.selection.values = plan.message[:total]
        counts = slots if self._layerwise else [sum(slots)]
        plan.channel.deal([*counts, *(segment.blocks for segment in bucket.segments if plan.means)])

    def receive(self, bucket: Bucket, position: int, grad: Tensor) -> None:
        plan = self._plans[bucket.index]
        plan.selection.receive(position, grad, bucket.state.get("velocity"), plan.rule)

    def exchange(self, bucket: Bucket) -> Exchange:
        plan = self._plans[bucket.index]
        summed = self.importance(bucket, plan) if self._budget_due() else None
        yield from self.communicate(bucket, plan)
        if summed is not None:
            # Summed on the ring, so that every rank computes its slots from the same bits.
            agreed = yield allreduce(summed.nan_to_num_(nan=0.0, posinf=0.0), "budget", "shares")
            plan.weights = shares(agreed.tolist(), plan.sizes)

    def communicate(self, bucket: Bucket, plan: Plan) -> Exchange:
        """The algorithm: agree on the entries, average them, assign the average."""
        selection, means = plan.selection, plan.means
        yield from selection.agree(plan.rule)
        selection.take(bucket.residual)
        if means is not None:
            means.send(plan.message[selection.total :], self._momentum, plan.invalid)
        key = derive(selection.turn.key, self._collectives.rank)
        mean, lost = yield from plan.channel.average(plan.message, plan.invalid, key)
        plan.sent = True
        whole, targets = None, self.targets(bucket, plan)
        if means is not None:
            mean, whole = torch.split(mean, [selection.total, bucket.blocks])
            lost, rest = torch.split(lost, [selection.total, bucket.blocks])
            for position in missing(targets):  # as Selection.spare() does
                bucket.segments[position].of_blocks(whole).fill_(math.nan)
            means.arrived(whole, rest)
        yield from self.arrived(bucket, plan, mean, lost)
        spared, velocity = selection.spare(targets, mean), bucket.state.get("velocity")
        selection.put(targets, velocity, Averages(spared, lost, self._scale, whole))

    def arrived(self, bucket: Bucket, plan: Plan, mean: Tensor, lost: Tensor) -> Exchange:
        """What a method does with the averages before they are assigned; see :meth:`Channel.average`. Part of
        :meth:`communicate`: a method with its own has to call it, or need not."""
        yield from ()

    def undo(self, bucket: Bucket) -> None:
        plan = self._plans[bucket.index]
        plan.channel.undo()
        if not plan.sent:
            return
        # Put what was taken back into the residual, and into no gradient.
        nowhere = [torch.empty(0, device=bucket.device)] * len(bucket.segments)
        taken = plan.selection.values
        plan.selection.put(nowhere, bucket.state.get("velocity"), Averages(torch.zeros_like(taken), taken, 0.0))
        if plan.means is not None:
            plan.means.undo(plan.message[plan.selection.total :])
        plan.sent = False

    def invalidate(self, bucket: Bucket, bad: Tensor) -> None:
        """If ``bad``, bool, (), no rank's average of this step will be finite."""
        self._plans[bucket.index].invalid |= bad.to(torch.int32)

    def restart(self, bucket: Bucket) -> None:
        plan = self._plans[bucket.index]
        plan.forget()
        plan.channel = self._channel(bucket)
        self._density.restart()
        super().restart(bucket)

    def _budget_due(self) -> bool:
        return self._budget_interval > 0 and self._step % self._budget_interval == self._budget_interval - 1

    def drop_velocity(self) -> None:
        super().drop_velocity()
        for plan in self._plans:
            if plan.means is not None:
                plan.means.velocity.zero_()

    # What is held back, and saved.

    def held(self, bucket: Bucket, segment: Segment) -> Tensor:
        means = self._plans[bucket.index].means
        if means is None:
            return super().held(bucket, segment)
        return segment.reshaped(bucket.peek(segment) + means.waiting(segment))

    def held_norm(self, bucket: Bucket) -> Tensor:
        if self._plans[bucket.index].means is None:
            return super().held_norm(bucket)
        norm: Tensor = torch.stack([self.held(bucket, segment).norm() for segment in bucket.segments]).norm()
        return norm

    def method_state(self) -> dict[str, Any]:
        weights = {
            segment.name: weight
            for bucket, plan in zip(self._buckets, self._plans, strict=True)
            for segment, weight in zip(bucket.segments, plan.weights, strict=True)
        }
        return {
            **super().method_state(),
            "made_with": self._made_with(),
            "weights": weights,
            "channels": [plan.channel.state() for plan in self._plans],
            "density": self._density.state(),
            "strides": self._strides(),
            "block_means": [plan.means.state() for plan in self._plans if plan.means],
        }

    def follows_memory(self) -> bool:
        """Whether a state's tensors depend on the order in which the parameters lie in memory."""
        return self._block_means

    def _strides(self) -> dict[str, list[int]]:
        """Of the dimensions in which they mean something."""
        parameters = {segment.name: segment.parameter for _, segment in self._places()}
        return {
            name: [stride for stride, size in zip(p.stride(), p.shape, strict=True) if size > 1]
            for name, p in parameters.items()
        }

    def _made_with(self) -> dict[str, Any]:
        """What a state's tensors depend on."""
        return {
            **({"block means": True} if self._block_means else {}),
            "values": self._codec.name,
            "layerwise": self._layerwise,
            "density schedule": type(self._density).__name__,
            "buckets (bucket_mb)": [[segment.name for segment in bucket.segments] for bucket in self._buckets],
        }

    def load_method_state(self, state: dict[str, Any]) -> None:
        ours, theirs = self._made_with(), state.get("made_with", {})
        for what in {**ours, **theirs}:
            if theirs.get(what) != ours.get(what):
                raise ValueError(
                    f"the state was made with other {what}: {theirs.get(what)!r:.200}, and this compressor has "
                    f"{ours.get(what)!r:.200}"
                )
        for name, stride in self._strides().items() if self.follows_memory() else ():
            if state["strides"][name] != stride:
                raise ValueError(
                    f"{name}: the state was saved in the memory order of strides {state['strides'][name]}, and this "
                    f"parameter has {stride}: use the same memory_format"
                )
        for plan, channel in zip(self._plans, state["channels"], strict=True):
            plan.channel.check_state(channel)
        super().load_method_state(state)
        self._density.load_state(state["density"])
        for bucket, plan, channel in zip(self._buckets, self._plans, state["channels"], strict=True):
            plan.weights = [state["weights"][segment.name] for segment in bucket.segments]
            plan.channel.load_state(channel)
            plan.shape, plan.sent, plan.unchecked = (), False, True
            plan.unlike.zero_()
        for plan, means in zip(self._plans, state.get("block_means", ()), strict=False):
            if plan.means is not None:
                plan.means.load_state(means)
