"""Importance-weighted pruning on ring allreduce (Cheng & Xu, arXiv 1901.01544)."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..bucket import Bucket
from ..budget import apportion, shares
from ..codecs import codec
from ..collectives import allgather, allreduce
from ..compressor import Compressor
from ..driver import Exchange
from ..schedule import WarmUp
from ..selection import SELECTIONS, Rule, Selection, Turn, importance

# Under this, a weight counts as zero; it only keeps an all-zero parameter's scores finite.
_TINY = 1e-12
# mean|w| drifts slowly: it is measured this often, in steps.
_FLOOR_INTERVAL = 100
# On a GPU the ranks' agreement is looked at this often, in steps.
_CHECK_INTERVAL = 100


class _Plan:
    """One bucket's share of the method: how many slots each parameter has now, and what was drawn for this step."""

    def __init__(self, bucket: Bucket) -> None:
        self.sizes = [segment.numel for segment in bucket.segments]
        self.weights = [float(size) for size in self.sizes]
        self.floors = torch.zeros(len(self.sizes), device=bucket.device)
        self.invalid = torch.zeros(1, dtype=torch.int32, device=bucket.device)
        self.shape: tuple[object, ...] = ()
        self.unchecked = True
        self.sent: tuple[Tensor, Tensor] | None = None
        self.selection: Selection
        self.payload: Tensor
        self.rule: Rule

    @property
    def everything(self) -> bool:
        """Density 1: no indices are needed."""
        return self.selection.total == sum(self.sizes)


class IWP(Compressor):
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

    The paper's: the importance, the random leaders, the layer-wise budget, the ring. Ours: block-local choice (the m
    largest of every 256 entries), ``floor``, the random share, everything counted in the wire ratio.

    Args:
        named_parameters: ``(name, parameter)`` pairs of the optimizer's parameters, as ``model.named_parameters()``.
        density: slots as a share of the entries, in (0, 1]: what is sent in a step. Where leaders pick the same
            entry, fewer different ones are.
        values: how values travel: ``"fp16"`` or ``"fp32"``.
        selection: ``"block"`` (m of every 256, one byte an index) or ``"topk"`` (exact within a parameter, four
            bytes, slow).
        leaders: how many ranks, on average, choose the entries of one block; None for all.
        explore: share of the choices drawn at random in proportion to importance, in [0, 1].
        floor: the constant under the weights, in units of mean|w|; above 0.
        budget_interval: steps between re-balancings of the layers' shares by importance (within 1/4 and 4 times the
            density, the total constant); 0 keeps the shares equal.
        warmup_steps: steps over which density goes 1/4, 1/16, ... down to ``density``.
        momentum: momentum correction (u = momentum u + g enters the residual; sent entries of u are cleared), in [0,
            1). The optimizer's own momentum must then be 0, or it counts twice: :meth:`take_momentum` moves it here.
            Parameters that travel dense get plain momentum on their averaged gradient.
        seed, min_numel, bucket_mb, process_set, grad_scaler, collectives: see
            :class:`~hvd_compress.compressor.Compressor`.

    Raises:
        ValueError: an argument outside its range, or an optimizer with momentum beside ``momentum``.
        TypeError: ``named_parameters`` are not pairs, or a gradient is not of a floating dtype.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        density: float = 1 / 64,
        *,
        values: str = "fp16",
        selection: str = "block",
        leaders: int | None = None,
        explore: float = 0.05,
        floor: float = 0.5,
        budget_interval: int = 100,
        warmup_steps: int = 0,
        momentum: float = 0.0,
        **common: Any,
    ) -> None:
        self._density = WarmUp(density, warmup_steps)
        self._codec = codec(values)
        if selection not in SELECTIONS:
            raise ValueError(f"selection must be one of {', '.join(sorted(SELECTIONS))}, got {selection!r}")
        if leaders is not None and leaders < 1:
            raise ValueError(f"leaders must be at least 1, or None for all ranks, got {leaders}")
        if not 0.0 <= explore <= 1.0:
            raise ValueError(f"explore must lie in [0, 1], got {explore}")
        if not floor > 0.0:
            raise ValueError(f"floor must be above 0, got {floor}")
        if budget_interval < 0:
            raise ValueError(f"budget_interval must not be negative, got {budget_interval}")
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum must lie in [0, 1), got {momentum}")
        super().__init__(named_parameters, **common)
        self._selection, self._leaders, self._explore = selection, leaders, explore
        self._floor, self._budget_interval = floor, budget_interval
        self._momentum = 0.0
        self._plans = [_Plan(bucket) for bucket in self._buckets]
        self._dense_velocity: dict[str, Tensor] = {}
        if momentum:
            self._set_momentum(momentum)

    def __repr__(self) -> str:
        density = f"1/{1 / self._density.density:g}"
        warm = f", warm-up {self._density.steps} steps" if self._density.steps else ""
        leaders = "all ranks lead" if self._leaders is None else f"{self._leaders} random leader(s) a block"
        momentum = f", momentum correction {self._momentum:g}" if self._momentum else ""
        return (
            f"IWP(density {density}{warm}, {self._selection} selection, {leaders}, {self._explore:.0%} random, "
            f"{self._codec.name} values{momentum}; {self.parameters_text()})"
        )

    # Momentum.

    def take_momentum(self, optimizer: Optimizer) -> float:
        """Takes the momentum over from an SGD-like ``optimizer``: it becomes momentum correction here and 0 there.

        Call it before the first step, on the optimizer that is given to Horovod; returns the momentum taken.
        Parameters that travel dense keep theirs, here. Weight decay, which stays in the optimizer and loses its
        momentum there, is scaled by 1 / (1 - momentum), so that it pulls as before. :meth:`return_momentum` undoes it
        all. A learning-rate schedule that cycles the momentum would bring it back: an error then.

        Raises:
            ValueError: the optimizer has no ``momentum``, its groups disagree, or it uses Nesterov's or dampening.
        """
        found: set[float | None] = {group.get("momentum") for group in optimizer.param_groups}
        momentum = found.pop()
        if found or momentum is None:
            raise ValueError(
                f"take_momentum needs one momentum for all parameter groups, got {sorted(map(str, {momentum, *found}))}"
            )
        if any(group.get("nesterov") or group.get("dampening") for group in optimizer.param_groups):
            raise ValueError("take_momentum knows plain momentum only: nesterov and dampening must be off")
        if not momentum:
            raise ValueError("take_momentum: the optimizer has no momentum to take (was it taken before?)")
        self._set_momentum(momentum)
        for group in optimizer.param_groups:
            group["momentum"] = 0.0
            group["weight_decay"] = group.get("weight_decay", 0.0) / (1.0 - momentum)
        return momentum

    def return_momentum(self, optimizer: Optimizer) -> float:
        """Gives the momentum back to ``optimizer`` and ends the correction; returns the momentum.

        Raises ``ValueError`` if there is none to give.
        """
        momentum, self._momentum = self._momentum, 0.0
        if not momentum:
            raise ValueError("return_momentum: this compressor has no momentum to return")
        self._dense_velocity.clear()
        for bucket in self._buckets:
            bucket.state.pop("velocity", None)
        for group in optimizer.param_groups:
            group["momentum"] = momentum
            group["weight_decay"] = group.get("weight_decay", 0.0) * (1.0 - momentum)
        return momentum

    def _set_momentum(self, momentum: float) -> None:
        self._momentum = momentum
        for bucket in self._buckets:
            if "velocity" not in bucket.state:
                bucket.add_state("velocity")

    def check_optimizer(self, optimizer: Optimizer) -> None:
        super().check_optimizer(optimizer)
        if not self._momentum:
            return
        for group in optimizer.param_groups:
            own = group.get("momentum") or (group.get("betas") or (0.0,))[0]
            if own:
                raise ValueError(
                    f"momentum would count twice: {self._momentum:g} in this compressor and {own:g} in "
                    f"{type(optimizer).__name__}; set the optimizer's to 0, or call "
                    "compression.take_momentum(optimizer) before training instead of momentum="
                )

    # The algorithm.

    def begin(self, bucket: Bucket) -> None:
        plan = self._plans[bucket.index]
        ranks, rank = self._collectives.size, self._collectives.rank
        density = self._density(self._step)
        shape = (density, ranks, rank, tuple(plan.weights))
        if plan.shape != shape:
            self._lay_out(bucket, plan, density)
            plan.shape = shape
        if self._step % _FLOOR_INTERVAL == 0:
            means = [segment.parameter.abs().mean(dtype=torch.float32) for segment in bucket.segments]
            plan.floors = torch.stack(means) * self._floor + _TINY
        plan.invalid.zero_()
        plan.rule = Rule(plan.floors, self._explore, 1.0 / self._scale, self._momentum, plan.invalid)
        # On the CPU a look costs nothing; a GPU would be waited for, so there only now and then.
        check = bucket.device.type == "cpu" or plan.unchecked or self._step % _CHECK_INTERVAL == 0
        plan.selection.begin(Turn.draw(self._seed, self._step, bucket.index, ranks), check)
        plan.sent, plan.unchecked = None, False

    def _lay_out(self, bucket: Bucket, plan: _Plan, density: float) -> None:
        total = max(1, round(density * sum(plan.sizes)))
        slots = apportion(total, plan.weights, plan.sizes)
        ranks = self._collectives.size
        a_block = density * 256
        run = 1 if self._leaders is None else max(1, math.ceil(a_block / min(self._leaders, ranks)))
        plan.selection = SELECTIONS[self._selection](bucket, slots, run, ranks, self._collectives.rank)
        length = bucket.residual.numel() if plan.everything else total
        plan.payload = torch.zeros(length, dtype=self._codec.dtype, device=bucket.device)

    def receive(self, bucket: Bucket, position: int, grad: Tensor) -> None:
        plan = self._plans[bucket.index]
        plan.selection.receive(position, grad, bucket.state.get("velocity"), plan.rule, not plan.everything)

    def exchange(self, bucket: Bucket) -> Exchange:
        plan = self._plans[bucket.index]
        selection, velocity = plan.selection, bucket.state.get("velocity")
        scale = self._scale / self._collectives.size
        limit = self._codec.limit(self._collectives.size)
        summed = self._importance(bucket, plan) if self._budget_due() else None
        if plan.everything:
            yield from self._exchange_everything(bucket, plan, scale, limit)
        else:
            selection.choose(plan.rule)
            gathered = yield allgather(selection.plane, "indices")
            picks = selection.in_slot_order(gathered)
            selection.take(picks, velocity, plan.invalid, plan.payload, limit)
            total = yield allreduce(plan.payload, "values")
            selection.put(picks, total, plan.payload, scale)
            plan.sent = picks, total
        if summed is not None:
            # Summed on the ring, so that every rank computes its slots from the same bits.
            agreed = yield allreduce(summed, "budget")
            plan.weights = shares(agreed.tolist(), plan.sizes)

    def _exchange_everything(self, bucket: Bucket, plan: _Plan, scale: float, limit: float) -> Exchange:
        bad = plan.invalid != 0
        sent = bucket.residual.clamp(-limit, limit).to(plan.payload.dtype)
        plan.payload.copy_(torch.where(bad, float("nan"), sent))
        total = yield allreduce(plan.payload, "values")
        finite = total.isfinite()
        bucket.residual.sub_(torch.where(finite, sent.float(), 0.0))
        # Nothing was held back, so the velocity goes on as in plain momentum: it is not cleared.
        plan.sent = plan.payload, total
        for segment, grad in zip(bucket.segments, bucket.gradients, strict=True):
            if grad is not None:
                flat = grad.as_strided((segment.numel,), (1,))
                flat.copy_(segment.of(total)[: segment.numel].float().mul_(scale))

    def undo(self, bucket: Bucket) -> None:
        plan = self._plans[bucket.index]
        if plan.sent is None:
            return
        picks, total = plan.sent
        # What had not come back already: to put, a sum that was lost.
        lost = torch.where(total.isfinite(), float("nan"), 0.0).to(total.dtype)
        if plan.everything:
            bucket.residual.add_(torch.where(lost.isnan(), plan.payload.float(), 0.0))
        else:
            bucket.clear()
            plan.selection.put(picks, lost, plan.payload, 0.0)
        plan.sent = None

    def settle(self, number: int, grad: Tensor) -> None:
        if not self._momentum:
            return
        name = self._names[number]
        velocity = self._dense_velocity.get(name)
        if velocity is None:
            velocity = self._dense_velocity[name] = torch.zeros_like(grad, dtype=torch.float32)
        if self._scaler is None:
            grad.copy_(velocity.mul_(self._momentum).add_(grad))
            return
        # A step with an infinity will be skipped: it must not stay in the velocity.
        new = velocity * self._momentum + grad.float() / self._scale
        finite = new.isfinite()
        velocity.copy_(torch.where(finite, new, velocity))
        grad.copy_(torch.where(finite, new * self._scale, grad.float()))

    def restart(self, bucket: Bucket) -> None:
        plan = self._plans[bucket.index]
        plan.weights, plan.shape, plan.sent, plan.unchecked = [float(size) for size in plan.sizes], (), None, True

    def _budget_due(self) -> bool:
        return self._budget_interval > 0 and self._step % self._budget_interval == self._budget_interval - 1

    def _importance(self, bucket: Bucket, plan: _Plan) -> Tensor:
        """Each parameter's summed importance on this rank: float64, (segments,)."""
        sums = [
            importance(bucket, segment, floor).sum(dtype=torch.float64)
            for segment, floor in zip(bucket.segments, plan.floors, strict=True)
        ]
        return torch.stack(sums).nan_to_num_(nan=0.0, posinf=0.0)

    # Checkpoints.

    def method_state(self) -> dict[str, Any]:
        weights, floors = {}, {}
        for bucket, plan in zip(self._buckets, self._plans, strict=True):
            for segment, weight, floor in zip(bucket.segments, plan.weights, plan.floors, strict=True):
                weights[segment.name], floors[segment.name] = weight, floor.clone()
        velocity = {name: tensor.clone() for name, tensor in self._dense_velocity.items()}
        return {"momentum": self._momentum, "weights": weights, "floors": floors, "dense_velocity": velocity}

    def load_method_state(self, state: dict[str, Any]) -> None:
        if state["momentum"] != self._momentum:
            raise ValueError(
                f"the state was made with momentum {state['momentum']}, this compressor has {self._momentum}"
            )
        for bucket, plan in zip(self._buckets, self._plans, strict=True):
            plan.weights = [state["weights"][segment.name] for segment in bucket.segments]
            plan.floors = torch.stack([state["floors"][segment.name].to(bucket.device) for segment in bucket.segments])
            plan.sent, plan.unchecked = None, True
        parameters = dict(zip(self._names, self._parameters, strict=True))
        self._dense_velocity = {
            name: tensor.to(parameters[name].device, copy=True) for name, tensor in state["dense_velocity"].items()
        }
