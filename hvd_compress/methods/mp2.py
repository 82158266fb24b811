"""Parameters that were not sent are predicted (MP2: Liu et al., Computer Networks 255, 2024)."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..bucket import Bucket
from ..codecs import Codec
from ..codecs.scales import Moments
from ..collectives import allreduce
from ..driver import Exchange
from ..history import History, flat_weights, root_mean_squares
from ..predictor import Predictor, fields, predict, shipped
from ..reference import BLOCK
from ..rng import derive
from ..selection import Everything, Rotating, Rule, Selection, SharedSelection, Unled
from ..sparse import Plan, Sparse

_CHOICES = ("significance", "rotation")
# Equal on all ranks, entry by entry. ``arrived``: the gradient per step that came last; ``guess``: what is predicted of
# it per step; ``applied``: the sum of what was applied of that since.
_PREDICTED = ("arrived", "guess", "applied")
# And what the choice goes by, too: see History.
_SHARED = (*_PREDICTED, "smoothed", "last_sent")
# Windows of a closed layer that are predicted all the same in a step, to see if it pays by now.
_PROBES = 16
# How fast the gate forgets.
_DECAY = 0.97
_TINY = 1e-12
# Beyond this many times as long as an entry waits on average, one wait is like another.
_OLD = 4.0
_PRIME = 1048573  # below 2**20


@dataclass
class _Before:
    """What a step has changed in the shared state of a bucket, to be undone: on the entries sent, and windows."""

    selection: Unled
    arrived: Tensor  # bool, (1,)
    known: dict[str, Tensor]
    fit: Tensor
    guesses: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    #: Segment by segment, whether a prediction was applied.
    applied: list[bool] = field(default_factory=list)


class MP2(Sparse):
    r"""A part of the entries is sent, and a small network predicts the others from what all ranks have seen.

    Implements the published idea of Liu et al., *MP2* (Computer Networks 255, 2024): workers push a subset of the
    parameters, and the rest is predicted by an already trained network of convolution, channel attention and max
    pooling, where training shows that its predictions are good. On rank i::

        S   = what matters most, by what all ranks know            no index travels
        h   = predictor(what arrived; when; smoothed; weights)     the same on all ranks; 0 where the gate is closed
        g   = mean_i a_i[S] on S, h off it                         a_i = r_i + g_i
        r_i = a_i - what was sent on S, a_i - h off it              a wrong guess is paid back

    The gate of a layer is open while the cosine between what was predicted and what then arrived is at least ``gate``.

    The paper's: the predictor's architecture, predicting what is not sent, choosing by how training goes. Ours: which
    entries are sent, the residual, the predictor's inputs and training (``scripts/train_predictor.py``), the gate's
    measure.

    Every rank computes the predictions for itself, so all need one type of processor and as many threads: every
    ``check_interval`` steps they compare a checksum, and where one differs, all take over rank 0's predictions,
    weights and optimizer state, with a warning. (Not the parameters that travel dense: a norm over all gradients, as in
    ``clip_grad_norm_``, carries a wrong prediction into those too.)

    Args:
        named_parameters: ``(name, parameter)`` pairs of the optimizer's parameters, as ``model.named_parameters()``.
        density: entries sent in a step as a share of all, in (0, 1].
        choice: ``"significance"``: m of every 256, by lot in proportion to the smoothed gradient's size. By lot, since
            waits that are all alike are a delay in the loop of gradient and step, and swing it up; random ones damp.
            ``"rotation"``: every n-th entry, each in its turn; the density must be 1 / n.
        values: how values travel: a name or a codec of :mod:`hvd_compress.codecs`.
        prediction: predict what is not sent. Off by default: with the predictor that is shipped, training was better
            without (docs/results.md).
        gate: the least cosine, in [-1, 1].
        smoothing: weight of the past in what is smoothed, in [0, 1).
        floor: the constant under the smoothed gradient's size, in units of its root mean square; above 0.
        check_interval: steps between checksums; 0 never checks.
        predictor: another one than the package's; the same on all ranks.
        momentum: see :class:`~hvd_compress.IWP`.
        seed, min_numel, bucket_mb, dense_values, process_set, grad_scaler, collectives: see
            :class:`~hvd_compress.compressor.Compressor`.

    Raises:
        ValueError: an argument outside its range, or an optimizer with momentum beside ``momentum``.
        TypeError: ``named_parameters`` are not pairs, or a gradient is not of a floating dtype.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
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
        if not 0.0 < density <= 1.0:
            raise ValueError(f"density must lie in (0, 1], got {density}")
        if choice == "rotation" and abs(round(1 / density) * density - 1) > 1e-6:
            raise ValueError(f'choice="rotation" takes a density of 1 / n, got {density}')
        if not floor > 0.0:
            raise ValueError(f"floor must be above 0, got {floor}")
        if not -1.0 <= gate <= 1.0:
            raise ValueError(f"gate must lie in [-1, 1], got {gate}")
        if check_interval < 0:
            raise ValueError(f"check_interval must not be negative, got {check_interval}")
        super().__init__(
            named_parameters,
            density,
            values=values,
            budget_interval=0,
            warmup_steps=0,
            momentum=momentum,
            **common,
        )
        self._period, self._choice, self._floor = max(1, round(1 / density)), choice, floor
        self._prediction, self._gate, self._smoothing = prediction, gate, smoothing
        self._check_interval, self._own_predictor = check_interval, predictor
        for bucket in self._buckets if prediction else ():
            for name in _PREDICTED:
                bucket.add_state(name)
        # The rotation alone needs to know nothing.
        knowing = prediction or choice == "significance"
        self._history = [History(bucket, smoothing) for bucket in self._buckets] if knowing else []
        #: A layer's running sums of predicted * arrived, predicted^2 and arrived^2: float64, (3, segments).
        self._fit = [torch.zeros(3, len(b.segments), dtype=torch.float64, device=b.device) for b in self._buckets]
        self._before: list[_Before | None] = [None] * len(self._buckets)
        #: Weights and optimizer state of rank 0, to be taken over at the end of the step.
        self._repairs: list[tuple[Tensor, Tensor]] = []

    def __repr__(self) -> str:
        how = f"prediction above {self._gate:g}" if self._prediction else "no prediction"
        return (
            f"MP2(density {self._density} by {self._choice}, {how}, {self._codec.name} values{self.momentum_text()}; "
            f"{self.parameters_text()})"
        )

    def open_layers(self) -> dict[str, bool]:
        """Whether each compressed parameter is predicted now, by name."""
        return {
            segment.name: here
            for bucket in self._buckets
            for segment, here in zip(bucket.segments, self._open(bucket), strict=True)
        }

    # What is sent.

    def select(self, bucket: Bucket, plan: Plan, slots: list[int], density: float) -> Selection:
        return Rotating(bucket, self._period) if self._choice == "rotation" else SharedSelection(bucket, slots, False)

    def rule(self, bucket: Bucket, plan: Plan) -> Rule:
        return Rule(None, 0.0, 1.0 / self._scale, self._momentum, plan.invalid)

    def settings(self) -> tuple[Any, ...]:
        ours = self._choice, self._floor, self._prediction, self._gate, self._smoothing, self._check_interval
        return *super().settings(), *ours

    def importance(self, bucket: Bucket, plan: Plan) -> Tensor:
        raise NotImplementedError("every parameter sends the same share")

    def begin(self, bucket: Bucket) -> None:
        self._before[bucket.index] = None
        # Of a step that failed.
        self._repairs.clear()
        super().begin(bucket)

    def communicate(self, bucket: Bucket, plan: Plan) -> Exchange:
        selection = plan.selection
        assert isinstance(selection, Unled)
        if isinstance(selection, SharedSelection):
            for position, score in enumerate(self.significance(bucket)):
                selection.pick(position, score, 1.0)
        if not self._prediction or isinstance(selection, Everything):
            yield from super().communicate(bucket, plan)
            if self._history:
                self._history[bucket.index].learn(selection, plan.channel.mean, self._step)
            return
        yield from selection.agree(plan.rule)
        values = selection.take(bucket.residual)
        key = derive(selection.turn.key, self._collectives.rank)
        mean, lost = yield from plan.channel.average(values, plan.invalid, key)
        arrived = mean[:1].isfinite()
        fresh = self._learn(bucket, selection, plan, mean, arrived)
        self._refresh(bucket, selection, fresh, self._open(bucket))
        if self._check_interval and self._step % self._check_interval == self._check_interval - 1:
            yield from self._compare(bucket)
        self._apply(bucket, plan, arrived)
        selection.put(self.targets(bucket, plan), bucket.state.get("velocity"), mean, lost, self._scale)
        selection.write(bucket.state["applied"], self._sent_none_of(selection, bucket, arrived))
        plan.sent = True

    def significance(self, bucket: Bucket) -> list[Tensor]:
        """Of each segment's entries, in memory order: float32, (entries,), the same bits on all ranks."""
        smoothed = bucket.state["smoothed"]
        ends = [0, *(segment.first_block + segment.blocks for segment in bucket.segments)]
        units = Moments(smoothed, torch.tensor(ends, device=bucket.device) * BLOCK).rms.float() + _TINY
        return [
            segment.of(smoothed)[: segment.numel].abs() + self._floor * unit
            for segment, unit in zip(bucket.segments, units, strict=True)
        ]

    # What is learnt from what arrives.

    def _learn(self, bucket: Bucket, selection: Unled, plan: Plan, mean: Tensor, arrived: Tensor) -> Tensor:
        """The gradients per step since each entry was last sent: float32, (slots,)."""
        state, fit = bucket.state, self._fit[bucket.index]
        known = {name: selection.read(state[name]) for name in ("arrived", "applied")}
        self._before[bucket.index] = _Before(selection, arrived, known, fit.clone())
        rate = self._history[bucket.index].learn(selection, mean + known["applied"], self._step)
        rate, guess = torch.where(arrived, rate, known["arrived"]), selection.read(state["guess"])
        selection.write(state["arrived"], rate)
        # By sums of squares, which are the same bits on all ranks; a dot product's are not.
        edges = torch.tensor([*selection.first, selection.total], device=bucket.device)
        both, one, other = (Moments(x, edges).square for x in (guess + rate, guess, rate))
        seen = torch.stack([(both - one - other) / 2, one, other])
        fit.copy_(torch.where(arrived, fit * _DECAY + seen, fit))
        return rate

    def _open(self, bucket: Bucket) -> list[bool]:
        dot, guessed, came = self._fit[bucket.index].tolist()
        pairs = zip(dot, guessed, came, strict=True)
        return [self._prediction and g > 0.0 and d >= self._gate * (g * c) ** 0.5 for d, g, c in pairs]

    # What is predicted.

    def _refresh(self, bucket: Bucket, selection: Unled, fresh: Tensor, opened: list[bool]) -> None:
        """New predictions for those windows whose turn it is: as large a share as is sent."""
        state = bucket.state
        before = self._before[bucket.index]
        assert before is not None
        here, mask = torch.zeros_like(state["guess"]), torch.zeros_like(state["guess"])
        selection.write(here, fresh)
        selection.write(mask, torch.ones_like(fresh))
        weights = flat_weights(bucket)
        sizes, units = root_mean_squares(bucket, weights, state["arrived"])
        for position, segment in enumerate(bucket.segments):
            every = self._period if opened[position] else max(self._period, segment.blocks // _PROBES)
            if self._step % every >= segment.blocks:
                continue
            windows = torch.arange(self._step % every, segment.blocks, every, device=bucket.device)
            weight = torch.nn.functional.pad(weights[position], (0, segment.blocks * BLOCK - segment.numel))
            unit, size, arrived = units[position], sizes[position], segment.of(state["arrived"])
            smoothed, age = segment.of(state["smoothed"]), (self._step - segment.of(state["last_sent"])) / self._period
            parts = (segment.of(here) / unit, segment.of(mask), age.clamp(max=_OLD), arrived / unit, smoothed / unit)
            chosen = [part.view(-1, BLOCK)[windows] for part in (*parts, weight / size)]
            guess = self.predict(bucket, position, windows, fields(*chosen)) * unit
            guesses = segment.of(state["guess"]).view(-1, BLOCK)
            before.guesses.append((guesses, windows, guesses[windows]))
            guesses[windows] = guess
            segment.of(state["guess"])[segment.numel :] = 0.0

    def predict(self, bucket: Bucket, position: int, windows: Tensor, seen: Tensor) -> Tensor:
        """The gradients per step, in units of their layer's root mean square, float32 (n, 256), of those ``windows`` of
        a segment, int64 (n,); ``seen``: see :func:`~hvd_compress.predictor.fields`."""
        return predict(self._own_predictor or shipped(bucket.device), seen)

    def _apply(self, bucket: Bucket, plan: Plan, arrived: Tensor) -> None:
        """The prediction stands for every entry; what was sent is then assigned over it."""
        before = self._before[bucket.index]
        assert before is not None
        targets = self.targets(bucket, plan)
        for segment, target, here in zip(bucket.segments, targets, self._open(bucket), strict=True):
            applied = here and target.numel() > 0
            before.applied.append(applied)
            if applied:
                guess = torch.where(arrived, segment.of(bucket.state["guess"]), 0.0)
                segment.of(bucket.residual).sub_(guess)
                segment.of(bucket.state["applied"]).add_(guess)
                target.as_strided((target.numel(),), (1,)).copy_(guess[: target.numel()] * self._scale)

    def _sent_none_of(self, selection: Unled, bucket: Bucket, arrived: Tensor) -> Tensor:
        """What is applied, and waits to be compared, of entries that have just been sent."""
        return torch.where(arrived, 0.0, selection.read(bucket.state["applied"]))

    def undo(self, bucket: Bucket) -> None:
        before = self._before[bucket.index]
        if before is not None:
            # Nothing at all was applied if the exchange did not come that far.
            for segment, was in zip(bucket.segments, before.applied, strict=False):
                if was:
                    guess = torch.where(before.arrived, segment.of(bucket.state["guess"]), 0.0)
                    segment.of(bucket.residual).add_(guess)
                    segment.of(bucket.state["applied"]).sub_(guess)
            self._history[bucket.index].undo()
            for name, values in before.known.items():
                before.selection.write(bucket.state[name], values)
            for guesses, windows, old in before.guesses:
                guesses[windows] = old
            self._fit[bucket.index].copy_(before.fit)
            self._before[bucket.index] = None
        elif self._history and self._plans[bucket.index].sent:
            self._history[bucket.index].undo()
        super().undo(bucket)

    # All ranks the same.

    def _compare(self, bucket: Bucket) -> Exchange:
        shared, steered = [bucket.state[name] for name in _SHARED], self._steered(bucket)
        # Whoever does not know its optimizer yet (the first step after a load) has nothing to say of its state.
        size = sum(t.numel() for t in steered) if self._guard.optimizer is not None else 0
        mark = torch.cat([self._checksum(bucket), torch.tensor([size], device=bucket.device)]).double()
        total = yield allreduce(torch.stack([torch.ones_like(mark), mark, mark * mark]), "budget", "checksum")
        equal, alike = (total[0] * total[2] == total[1] * total[1]).tolist()
        if equal:
            return
        what = "all take over rank 0's" if alike and size else "but their optimizers' states do, too: not repaired now"
        warnings.warn(
            f"MP2: the ranks' predictions differ (other processors? other numbers of threads?): {what}", stacklevel=2
        )
        if not (alike and size):
            return
        flat = torch.cat([tensor.float().flatten() for tensor in (*shared, *steered)])
        # The sum of rank 0's and of zeros. It costs as much as several dense steps, and should never be needed.
        flat = yield allreduce(flat if self._collectives.rank == 0 else torch.zeros_like(flat), "budget", "repair")
        parts = torch.split(flat, [tensor.numel() for tensor in (*shared, *steered)])
        right = [part.view(tensor.shape) for part, tensor in zip(parts, (*shared, *steered), strict=True)]
        # Rank 0's weights have rank 0's predictions in them: only those can still be paid back.
        own = bucket.state["applied"].clone()
        for tensor, value in zip(shared, right, strict=False):
            tensor.copy_(value)
        bucket.residual.add_(own).sub_(bucket.state["applied"])
        self._fit[bucket.index].zero_()
        before = self._before[bucket.index]
        assert before is not None
        self._history[bucket.index].keep()
        before.known.clear()
        before.guesses.clear()
        before.fit.zero_()
        # Backward may still need the weights as they are.
        self._repairs += zip(steered, right[len(shared) :], strict=True)

    def _checksum(self, bucket: Bucket) -> Tensor:
        """Of predictions and weights: int64, (1,), below 2**20, so that sums of squares are exact."""
        weights = flat_weights(bucket)
        bits = torch.cat([bucket.state["guess"], bucket.state["smoothed"], *weights]).view(torch.int32).long()
        place = torch.arange(bits.numel(), device=bits.device) % 8191 + 1
        # Modulo a prime, in which every bit of a float counts.
        return ((bits * place) % _PRIME).sum().remainder(_PRIME).view(1)

    def _steered(self, bucket: Bucket) -> list[Tensor]:
        """Weights, and the optimizer's tensors of their shape, which went astray with the predictions."""
        optimizer = self._guard.optimizer
        tensors = []
        for segment in bucket.segments:
            tensors.append(segment.parameter.detach())
            state = optimizer.state.get(segment.parameter, {}) if optimizer is not None else {}
            tensors += [v for v in state.values() if isinstance(v, Tensor) and v.shape == segment.parameter.shape]
        return tensors

    def finished(self) -> None:
        for tensor, right in self._repairs:
            tensor.copy_(right)
        self._repairs.clear()

    def restart(self, bucket: Bucket) -> None:
        super().restart(bucket)
        if self._history:
            self._history[bucket.index].restart()
        for name in _PREDICTED if self._prediction else ():
            bucket.state[name].zero_()
        self._fit[bucket.index].zero_()
        self._before[bucket.index] = None
        self._repairs.clear()

    def _made_with(self) -> dict[str, Any]:
        return {**super()._made_with(), "prediction": self._prediction, "choice": self._choice}

    def method_state(self) -> dict[str, Any]:
        return {**super().method_state(), "fit": [fit.clone() for fit in self._fit]}

    def load_method_state(self, state: dict[str, Any]) -> None:
        super().load_method_state(state)
        for mine, fit in zip(self._fit, state["fit"], strict=True):
            mine.copy_(fit)
