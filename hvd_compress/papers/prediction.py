"""MP2's prediction of unsent entries, equal on all ranks: its state, its gate, and how a step is undone."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..codecs.scales import Moments
from ..engine.bucket import Bucket
from ..engine.state import TensorLeaf, Tree
from ..engine.work import Part, Step
from ..reference import BLOCK
from ..selection.pickers import Picker
from .history import flat_weights, root_mean_squares
from .predictor import fields, predict, shipped

# The smallest cosine of prediction and gradient at which a piece's predictions are applied.
_GATE = 0.1
# Windows of a closed layer that are predicted in each step, to measure whether the gate should open.
_PROBES = 16
# Decay of the gate's running sums.
_DECAY = 0.97
# Upper limit of the age of an entry, in units of the mean time between two transmissions.
_MAX_AGE = 4.0


@dataclass
class _Before:
    picker: Picker
    #: Whether the averages were finite: bool, (1,).
    arrived: Tensor
    #: Tensors of the state, and their old values at the picked entries.
    picked: list[tuple[Tensor, Tensor]]
    fit: Tensor
    #: Windows of the guess, their numbers and their old values.
    guesses: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    #: By piece, whether a prediction was applied.
    applied: list[bool] = field(default_factory=list)


class Prediction(Part):
    """The predicted gradients of one bucket's entries, equal on all ranks.

    Bucket-wide, float32: ``arrived``, the last average gradient per step, predicted part included; ``trend``, the same,
    smoothed; ``guess``, its prediction; ``applied``, the sum of the predictions that were applied since the entry was
    last sent. ``period``: mean number of steps between two transmissions of an entry, in which all windows are
    predicted once. ``smoothing``: weight of the past in ``trend``.
    """

    def __init__(self, bucket: Bucket, period: int, smoothing: float) -> None:
        self._bucket, self._period, self._smoothing = bucket, period, smoothing
        self.arrived, self.trend, self.guess, self.applied = (bucket.zeros() for _ in range(4))
        #: Each piece's running sums of guess * gradient, guess^2 and gradient^2: float64, (3, pieces).
        self.fit = torch.zeros(3, len(bucket.pieces), dtype=torch.float64, device=bucket.device)
        self._before: _Before | None = None
        #: The edges of pieces among the picked entries: int64, (pieces + 1,).
        self._edges: Tensor

    def lay_out(self, picker: Picker) -> None:
        # Made once: creating it in each step would synchronise a GPU.
        edges = [*(picker.span(index).start for index in range(len(picker.slots))), picker.total]
        self._edges = torch.tensor(edges, dtype=torch.int64, device=self._bucket.device)

    def begin(self, step: Step) -> None:
        self._before = None

    def restart(self) -> None:
        for memory in (self.arrived, self.trend, self.guess, self.applied, self.fit):
            memory.zero_()
        self._before = None

    def state(self) -> Tree:
        described = {name: getattr(self, name) for name in ("arrived", "trend", "guess", "applied")}
        fit: Tree = {"product": TensorLeaf(self.fit[0]), "squares": TensorLeaf(self.fit[1:], low=0.0)}
        return {**{name: self._bucket.saved(memory) for name, memory in described.items()}, "fit": fit}

    def opened(self) -> list[bool]:
        """Returns, by piece, whether predictions are applied. Synchronises a GPU."""
        sums = zip(*self.fit.tolist(), strict=True)
        return [p > 0.0 and d >= _GATE * (p * g) ** 0.5 for d, p, g in sums]

    def predict(self, index: int, windows: Tensor, seen: Tensor) -> Tensor:
        """The predicted gradients per step of some ``windows``, int64 (n,), of the piece number ``index``: float32
        (n, 256), in units of the piece's root mean square. ``seen``: the network's inputs
        (:func:`hvd_compress.papers.predictor.fields`). Replaced while a predictor is trained."""
        return predict(shipped(self._bucket.device), seen)

    def follow(self, picker: Picker, mean: Tensor, last_sent: Tensor, step: Step, targets: list[Tensor]) -> None:
        """Learns from the ``mean`` that was received for the picked entries, unless it is not finite, predicts anew,
        and writes the predictions to all entries of open pieces in ``targets``; received values are written over them
        later. ``last_sent``: the step of each entry's last transmission, bucket-wide."""
        waited = (step.number - picker.read(last_sent)).clamp(min=1.0)
        before, rate = self._learn(picker, mean, waited)
        self._predict(before, rate, step.number, last_sent)
        self._apply(before, targets, step.scale)
        picker.write(self.applied, torch.where(before.arrived, 0.0, picker.read(self.applied)))

    def _learn(self, picker: Picker, mean: Tensor, waited: Tensor) -> tuple[_Before, Tensor]:
        """Returns what undoes the step, and the picked entries' gradients per step."""
        arrived = mean[:1].isfinite()
        picked = [(memory, picker.read(memory)) for memory in (self.arrived, self.trend, self.applied)]
        last, trend, applied = (values for _, values in picked)
        self._before = before = _Before(picker, arrived, picked, self.fit.clone())
        rate = torch.where(arrived, (mean + applied) / waited, last)
        new = trend * self._smoothing + rate * (1.0 - self._smoothing)
        picker.write(self.arrived, rate)
        picker.write(self.trend, torch.where(arrived, new, trend))
        # From sums of squares, which are the same bits on all ranks; a dot product is not.
        guess = picker.read(self.guess)
        both, one, other = (Moments(x, self._edges).square for x in (guess + rate, guess, rate))
        seen = torch.stack([(both - one - other) / 2, one, other])
        self.fit.copy_(torch.where(arrived, self.fit * _DECAY + seen, self.fit))
        return before, rate

    def _predict(self, before: _Before, fresh: Tensor, step: int, last_sent: Tensor) -> None:
        """Predicts every ``period``-th window anew. ``fresh``: the received gradients per step."""
        bucket, picker = self._bucket, before.picker
        here, mask = torch.zeros_like(self.guess), torch.zeros_like(self.guess)
        picker.write(here, fresh)
        picker.write(mask, torch.ones_like(fresh))
        weights = flat_weights(bucket)
        sizes, units = root_mean_squares(bucket, weights, self.arrived)
        for index, (piece, opened) in enumerate(zip(bucket.pieces, self.opened(), strict=True)):
            every = self._period if opened else max(self._period, piece.blocks // _PROBES)
            if step % every >= piece.blocks:
                continue
            span = range(step % every, piece.blocks, every)
            windows = torch.arange(span.start, span.stop, span.step, dtype=torch.int64, device=bucket.device)
            weight = torch.nn.functional.pad(weights[index], (0, piece.blocks * BLOCK - piece.numel))
            age = ((step - piece.of(last_sent)) / self._period).clamp(max=_MAX_AGE)
            values = [piece.of(x) / units[index] for x in (here, self.arrived, self.trend)]
            parts = (values[0], piece.of(mask), age, *values[1:], weight / sizes[index])
            seen = fields(*(part.view(-1, BLOCK)[windows] for part in parts))
            guesses = piece.of(self.guess).view(-1, BLOCK)
            before.guesses.append((guesses, windows, guesses[windows]))
            guess = self.predict(index, windows, seen) * units[index]
            # Weights that are not finite must not spoil the state.
            guesses[windows] = guess.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            piece.of(self.guess)[piece.numel :].zero_()

    def _apply(self, before: _Before, targets: list[Tensor], scale: float) -> None:
        for piece, target, opened in zip(self._bucket.pieces, targets, self.opened(), strict=True):
            applied = opened and target.numel() > 0
            before.applied.append(applied)
            if applied:
                guess = torch.where(before.arrived, piece.of(self.guess), 0.0)
                piece.of(self._bucket.residual).sub_(guess)
                piece.of(self.applied).add_(guess)
                target.as_strided((target.numel(),), (1,)).copy_(guess[: target.numel()] * scale)

    def undo(self) -> None:
        before = self._before
        if before is None:
            return
        for piece, was in zip(self._bucket.pieces, before.applied, strict=False):
            if was:
                guess = torch.where(before.arrived, piece.of(self.guess), 0.0)
                piece.of(self._bucket.residual).add_(guess)
                piece.of(self.applied).sub_(guess)
        for memory, values in before.picked:
            before.picker.write(memory, values)
        for guesses, windows, old in before.guesses:
            guesses[windows] = old
        self.fit.copy_(before.fit)
        self._before = None
