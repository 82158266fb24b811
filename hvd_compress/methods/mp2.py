"""Parameters that were not sent are predicted (MP2: Liu et al., Computer Networks 255, 2024)."""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..engine.agreement import alike
from ..engine.bucket import Bucket
from ..codecs import Codec
from ..codecs.scales import Moments
from ..engine.collectives import allreduce
from ..engine.exchange import Exchange
from ..selection.history import History, flat_weights
from .prediction import Prediction
from .predictor import Predictor, predict, shipped
from ..reference import BLOCK
from ..selection.base import Everything, Rotating, Selection, SharedSelection, Unled
from .sparse import Plan, Sparse

_CHOICES = ("significance", "rotation")
_TINY = 1e-12
_PRIME = 1048573  # the largest below agreement.MARKS


class MP2(Sparse):
    r"""A part of the entries is sent, and a small network predicts the others from what all ranks have seen.

    Implements the published idea of Liu et al., *MP2* (Computer Networks 255, 2024): workers push a subset of the
    parameters, and the rest is predicted by an already trained network of convolution, channel attention and max
    pooling, where training shows that its predictions are good. On rank i::

        S   = by lot, in proportion to what all ranks know         no index travels
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
    ``clip_grad_norm_``, carries a wrong prediction into those too. And an entry that was sent in the meantime is not
    paid back what was predicted wrongly of it.)

    Args:
        named_parameters: ``(name, parameter)`` pairs of the optimizer's parameters, as ``model.named_parameters()``.
        density: entries sent in a step as a share of all, in (0, 1].
        choice: ``"significance"``: m of every 256, by lot in proportion to the smoothed gradient's size. By lot, since
            waits that are all alike are a delay in the loop of gradient and step, and swing it up; random ones damp.
            ``"rotation"``: every n-th entry, each in its turn; the density must be 1 / n.
        values: how values travel: a name or a codec of :mod:`hvd_compress.codecs`.
        prediction: predict what is not sent. Off by default: it costs time, and the predictor that is shipped gains
            little (docs/results.md).
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
        self._gate, self._smoothing = gate, smoothing
        self._check_interval, self._own_predictor = check_interval, predictor
        # The rotation alone needs to know nothing. What is drawn by depends on what travelled only, and not on what was
        # predicted of it: ranks whose predictions differ must still draw alike, or they could not be repaired.
        knowing = prediction or choice == "significance"
        self._history = [History(bucket, smoothing) for bucket in self._buckets] if knowing else []
        self._predictions = [
            Prediction(bucket, self.predict, self._period, gate, smoothing) for bucket in self._buckets if prediction
        ]
        self._ends = [_ends(bucket) for bucket in self._buckets]
        #: Weights and optimizer state of rank 0, to be taken over at the end of the step.
        self._repairs: list[tuple[Tensor, Tensor]] = []

    def __repr__(self) -> str:
        how = f"prediction above {self._gate:g}" if self._predictions else "no prediction"
        return (
            f"MP2(density {self._density} by {self._choice}, {how}, {self._codec.name} values{self.momentum_text()}; "
            f"{self.parameters_text()})"
        )

    def open_layers(self) -> dict[str, bool]:
        """Whether each compressed parameter is predicted now, by name. Nothing without prediction."""
        return {
            segment.name: opened
            for bucket, prediction in zip(self._buckets, self._predictions, strict=False)
            for segment, opened in zip(bucket.segments, prediction.opened(), strict=True)
        }

    # What is sent.

    def select(self, bucket: Bucket, plan: Plan, slots: list[int], density: float) -> Selection:
        rotates = self._choice == "rotation"
        selection = Rotating(bucket, self._period) if rotates else SharedSelection(bucket, slots, False)
        if self._predictions:
            self._predictions[bucket.index].lay_out(selection)
        return selection

    def settings(self) -> tuple[Any, ...]:
        ours = self._choice, self._floor, bool(self._predictions), self._gate, self._smoothing, self._check_interval
        return *super().settings(), *ours

    def importance(self, bucket: Bucket, plan: Plan) -> Tensor:
        raise NotImplementedError("every parameter sends the same share")

    def begin(self, bucket: Bucket) -> None:
        # Of a step that failed.
        self._repairs.clear()
        if self._predictions:
            self._predictions[bucket.index].begin()
        super().begin(bucket)

    def communicate(self, bucket: Bucket, plan: Plan) -> Exchange:
        selection = plan.selection
        assert isinstance(selection, Unled)
        if isinstance(selection, SharedSelection):
            for position, score in enumerate(self.significance(bucket)):
                selection.pick(position, score, 1.0)
        yield from super().communicate(bucket, plan)
        if self._history:
            self._history[bucket.index].learn(selection, plan.channel.mean, self._step)

    def arrived(self, bucket: Bucket, plan: Plan, mean: Tensor, lost: Tensor) -> Exchange:
        selection = plan.selection
        assert isinstance(selection, Unled)
        if not self._predictions or isinstance(selection, Everything):
            return
        prediction, last_sent = self._predictions[bucket.index], self._history[bucket.index].last_sent
        waited = (self._step - selection.read(last_sent)).clamp(min=1.0)
        fresh = prediction.learn(selection, mean, waited)
        prediction.refresh(selection, fresh, self._step, last_sent)
        if self._check_interval and self._step % self._check_interval == self._check_interval - 1:
            yield from self._compare(bucket, selection, lost)
        prediction.apply(self.targets(bucket, plan), self._scale)
        prediction.sent(selection)

    def significance(self, bucket: Bucket) -> list[Tensor]:
        """Of each segment's entries, in memory order: float32, (entries,), the same bits on all ranks."""
        smoothed = bucket.state["smoothed"]
        units = Moments(smoothed, self._ends[bucket.index]).rms.float() + _TINY
        return [
            segment.of(smoothed)[: segment.numel].abs() + self._floor * unit
            for segment, unit in zip(bucket.segments, units, strict=True)
        ]

    def predict(self, bucket: Bucket, position: int, windows: Tensor, seen: Tensor) -> Tensor:
        """The gradients per step, in units of their layer's root mean square, float32 (n, 256), of those ``windows`` of
        a segment, int64 (n,); ``seen``: see :func:`~hvd_compress.predictor.fields`."""
        return predict(self._own_predictor or shipped(bucket.device), seen)

    def undo(self, bucket: Bucket) -> None:
        if self._predictions:
            self._predictions[bucket.index].undo()
        if self._history and self._plans[bucket.index].sent:
            self._history[bucket.index].undo()
        super().undo(bucket)

    # All ranks the same.

    def _compare(self, bucket: Bucket, selection: Unled, lost: Tensor) -> Exchange:
        prediction, steered = self._predictions[bucket.index], self._steered(bucket)
        # Whoever does not know its optimizer yet (the first step after a load) has nothing to say of its state.
        size = 1 + sum(t.numel() for t in steered) % _PRIME if self._guard.optimizer is not None else 0
        same = yield from alike(
            torch.cat([self._checksum(bucket), torch.tensor([size], device=bucket.device)]), "checksum"
        )
        equal, fit = same.tolist()
        if equal:
            return
        repairable = fit and size > 0
        what = "all take over rank 0's" if repairable else "but their optimizers' states do, too: not repaired now"
        warnings.warn(
            f"MP2: the ranks' predictions differ (other processors? other numbers of threads?): {what}", stacklevel=2
        )
        if not repairable:
            return
        ours = [*prediction.shared(), *steered]
        flat = torch.cat([tensor.float().flatten() for tensor in ours])
        # The sum of rank 0's and of zeros. It costs as much as several dense steps, and should never be needed.
        flat = yield allreduce(flat if self._collectives.rank == 0 else torch.zeros_like(flat), "budget", "repair")
        parts = torch.split(flat, [tensor.numel() for tensor in ours])
        right = [part.view(tensor.shape) for part, tensor in zip(parts, ours, strict=True)]
        first = len(ours) - len(steered)
        # Rank 0's weights have rank 0's predictions in them: only those can still be paid back. What is being sent has
        # left the residual already, and comes back into it as what was lost, or, if the step is undone, as it was.
        more = prediction.take_over(right[:first])
        bucket.residual.add_(more)
        for taken in (selection.values, lost):
            taken.add_(selection.read(more))
        # Backward may still need the weights as they are.
        self._repairs += zip(steered, right[first:], strict=True)

    def _checksum(self, bucket: Bucket) -> Tensor:
        """Of predictions and weights: int64, (1,), below ``MARKS``."""
        weights = flat_weights(bucket)
        bits = torch.cat([bucket.state["guess"], bucket.state["trend"], *weights]).view(torch.int32).long()
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
        if self._predictions:
            self._predictions[bucket.index].restart()
        self._repairs.clear()

    def _made_with(self) -> dict[str, Any]:
        return {**super()._made_with(), "prediction": bool(self._predictions), "choice": self._choice}

    def method_state(self) -> dict[str, Any]:
        return {**super().method_state(), "fit": [prediction.fit.clone() for prediction in self._predictions]}

    def load_method_state(self, state: dict[str, Any]) -> None:
        super().load_method_state(state)
        for prediction, fit in zip(self._predictions, state["fit"], strict=True):
            prediction.fit.copy_(fit)


def _ends(bucket: Bucket) -> Tensor:
    """Where segments begin and end in the bucket's flat memory: int64, (segments + 1,)."""
    ends = [0, *(segment.first_block + segment.blocks for segment in bucket.segments)]
    return torch.tensor(ends, device=bucket.device) * BLOCK
