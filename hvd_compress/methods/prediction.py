"""The prediction of entries that are not sent, equal on all ranks: its state, its gate, and how a step is undone."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..codecs.scales import Moments
from ..engine.bucket import Bucket
from ..reference import BLOCK
from ..selection.history import flat_weights, root_mean_squares
from ..selection.shared import SharedSelection
from .predictor import fields

# From a bucket, a segment's position, some of its windows, int64 (n,), and their inputs (see predictor.fields), to
# their gradients per step, float32 (n, 256), in units of the segment's root mean square.
Predict = Callable[[Bucket, int, Tensor, Tensor], Tensor]

# Windows of a closed layer that are predicted in each step, to measure whether the gate should open.
_PROBES = 16
# Decay of the gate's running sums.
_DECAY = 0.97
# Upper limit of the age of an entry, in units of the mean time between two transmissions.
_MAX_AGE = 4.0


@dataclass
class _Before:
    """What a step has changed, for undo: the entries that were sent, and windows."""

    selection: SharedSelection
    arrived: Tensor  # bool, (1,)
    known: dict[str, Tensor]
    fit: Tensor
    guesses: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    #: By segment, whether a prediction was applied.
    applied: list[bool] = field(default_factory=list)


class Prediction:
    """The predicted gradients of one bucket's entries, equal on all ranks.

    In the bucket's state, so that checkpoints contain them, float32, (entries,): ``arrived``, the last average gradient
    per step, predicted part included; ``trend``, the same, smoothed; ``guess``, its prediction; ``applied``, the sum of
    the predictions that were applied since the entry was last sent.

    Args:
        predict: the predictor.
        period: mean number of steps between two transmissions of an entry. All windows are predicted once in so many
            steps.
        gate: the smallest cosine of prediction and gradient at which a segment's predictions are applied; -1 applies
            all.
        smoothing: weight of the past in ``trend``.
    """

    STATES = ("arrived", "trend", "guess", "applied")

    def __init__(self, bucket: Bucket, predict: Predict, period: int, gate: float, smoothing: float) -> None:
        self._bucket, self._predict, self._period = bucket, predict, period
        self._gate, self._smoothing = gate, smoothing
        for name in self.STATES:
            bucket.add_state(name)
        #: Each segment's running sums of guess * gradient, guess^2 and gradient^2: float64, (3, segments).
        self.fit = torch.zeros(3, len(bucket.segments), dtype=torch.float64, device=bucket.device)
        self._before: _Before | None = None
        #: Where segments begin and end among the selected entries: int64, (segments + 1,).
        self._edges: Tensor

    def lay_out(self, selection: SharedSelection) -> None:
        """Prepares for the steps of this selection."""
        # Made once: creating it in each step would synchronise a GPU.
        edges = [*selection.first, selection.total]
        self._edges = torch.tensor(edges, dtype=torch.int64, device=self._bucket.device)

    def restart(self) -> None:
        """Forgets everything: new ranks know nothing."""
        for name in self.STATES:
            self._bucket.state[name].zero_()
        self.fit.zero_()
        self._before = None

    def begin(self) -> None:
        """A step begins: the last one can no longer be undone."""
        self._before = None

    def opened(self) -> list[bool]:
        """By segment, whether predictions are applied. Synchronises a GPU."""
        sums = zip(*self.fit.tolist(), strict=True)
        return [self._gate <= -1.0 or (p > 0.0 and d >= self._gate * (p * g) ** 0.5) for d, p, g in sums]

    def update(self, selection: SharedSelection, mean: Tensor, waited: Tensor) -> Tensor:
        """``mean`` was received for the selected entries, ``waited`` steps, float32 (slots,), after they were last
        sent; ignored if it is not finite. Returns their gradients per step."""
        state, arrived = self._bucket.state, mean[:1].isfinite()
        known = {name: selection.read(state[name]) for name in ("arrived", "trend", "applied")}
        self._before = _Before(selection, arrived, known, self.fit.clone())
        rate = torch.where(arrived, (mean + known["applied"]) / waited, known["arrived"])
        new = known["trend"] * self._smoothing + rate * (1.0 - self._smoothing)
        selection.write(state["arrived"], rate)
        selection.write(state["trend"], torch.where(arrived, new, known["trend"]))
        # From sums of squares, which are the same bits on all ranks; a dot product is not.
        guess = selection.read(state["guess"])
        both, one, other = (Moments(x, self._edges).square for x in (guess + rate, guess, rate))
        seen = torch.stack([(both - one - other) / 2, one, other])
        self.fit.copy_(torch.where(arrived, self.fit * _DECAY + seen, self.fit))
        return rate

    def predict(self, selection: SharedSelection, fresh: Tensor, step: int, last_sent: Tensor) -> None:
        """Predicts a ``period``-th of all windows anew. ``fresh``: the gradients per step just received for the
        selected entries."""
        bucket, state, before = self._bucket, self._bucket.state, self._current()
        here, mask = torch.zeros_like(state["guess"]), torch.zeros_like(state["guess"])
        selection.write(here, fresh)
        selection.write(mask, torch.ones_like(fresh))
        weights = flat_weights(bucket)
        sizes, units = root_mean_squares(bucket, weights, state["arrived"])
        for position, (segment, opened) in enumerate(zip(bucket.segments, self.opened(), strict=True)):
            every = self._period if opened else max(self._period, segment.blocks // _PROBES)
            if step % every >= segment.blocks:
                continue
            span = range(step % every, segment.blocks, every)
            windows = torch.arange(span.start, span.stop, span.step, dtype=torch.int64, device=bucket.device)
            weight = torch.nn.functional.pad(weights[position], (0, segment.blocks * BLOCK - segment.numel))
            age = ((step - segment.of(last_sent)) / self._period).clamp(max=_MAX_AGE)
            values = [segment.of(x) / units[position] for x in (here, state["arrived"], state["trend"])]
            parts = (values[0], segment.of(mask), age, *values[1:], weight / sizes[position])
            seen = fields(*(part.view(-1, BLOCK)[windows] for part in parts))
            guesses = segment.of(state["guess"]).view(-1, BLOCK)
            before.guesses.append((guesses, windows, guesses[windows]))
            guess = self._predict(bucket, position, windows, seen) * units[position]
            # Weights that are not finite must not spoil the state.
            guesses[windows] = guess.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            segment.padding(state["guess"]).zero_()

    def apply(self, targets: list[Tensor], scale: float) -> None:
        """Writes the predictions to all entries of open segments; the values that were sent are then written over
        them."""
        state, before = self._bucket.state, self._current()
        for segment, target, opened in zip(self._bucket.segments, targets, self.opened(), strict=True):
            applied = opened and target.numel() > 0
            before.applied.append(applied)
            if applied:
                guess = torch.where(before.arrived, segment.of(state["guess"]), 0.0)
                segment.of(self._bucket.residual).sub_(guess)
                segment.of(state["applied"]).add_(guess)
                target.as_strided((target.numel(),), (1,)).copy_(guess[: target.numel()] * scale)

    def sent(self, selection: SharedSelection) -> None:
        """The selected entries were sent: clears the sum of their applied predictions."""
        applied = self._bucket.state["applied"]
        selection.write(applied, torch.where(self._current().arrived, 0.0, selection.read(applied)))

    def undo(self) -> None:
        """Undoes the current step, as far as it went."""
        before, state = self._before, self._bucket.state
        if before is None:
            return
        for segment, was in zip(self._bucket.segments, before.applied, strict=False):
            if was:
                guess = torch.where(before.arrived, segment.of(state["guess"]), 0.0)
                segment.of(self._bucket.residual).add_(guess)
                segment.of(state["applied"]).sub_(guess)
        for name, values in before.known.items():
            before.selection.write(state[name], values)
        for guesses, windows, old in before.guesses:
            guesses[windows] = old
        self.fit.copy_(before.fit)
        self._before = None

    def _current(self) -> _Before:
        assert self._before is not None, "update() comes first in a step"
        return self._before
