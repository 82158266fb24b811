"""What was not sent, predicted alike on all ranks: its state, its gate, and how a step of it is taken back."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..engine.bucket import Bucket
from ..codecs.scales import Moments
from ..selection.history import flat_weights, root_mean_squares
from .predictor import fields
from ..reference import BLOCK
from ..selection.base import Unled

# From a segment's position, some of its windows, int64 (n,), and what is known of them (see predictor.fields), to their
# gradients per step, float32 (n, 256), in units of the segment's root mean square.
Ask = Callable[[Bucket, int, Tensor, Tensor], Tensor]

# Windows of a closed layer that are predicted all the same in a step, to see if it pays by now.
_PROBES = 16
# How fast the gate forgets.
_DECAY = 0.97
# Beyond this many times as long as an entry waits on average, one wait is like another.
_OLD = 4.0


@dataclass
class _Before:
    """What a step has changed, to be undone: on the entries sent, and windows."""

    selection: Unled
    arrived: Tensor  # bool, (1,)
    known: dict[str, Tensor]
    fit: Tensor
    guesses: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    #: Segment by segment, whether a prediction was applied.
    applied: list[bool] = field(default_factory=list)


class Prediction:
    """Of one bucket's entries, per step. It is equal on all ranks, and in the bucket's state, so that checkpoints carry
    it.

    Float32, (entries,), in the state: ``arrived``, the gradient per step that came last, predicted part included;
    ``trend``, the same, smoothed; ``guess``, what is predicted of it; ``applied``, the sum of what was applied of that
    since the entry was last sent.

    Args:
        ask: the predictor.
        period: steps that an entry waits on average. So many steps share the work of predicting all windows.
        gate: the least cosine of guess and gradient at which a segment's guesses are applied; -1 applies all.
        smoothing: weight of the past in ``trend``.
    """

    STATES = ("arrived", "trend", "guess", "applied")

    def __init__(self, bucket: Bucket, ask: Ask, period: int, gate: float, smoothing: float) -> None:
        self._bucket, self._ask, self._period, self._gate, self._smoothing = bucket, ask, period, gate, smoothing
        for name in self.STATES:
            bucket.add_state(name)
        #: A segment's running sums of guess * gradient, guess^2 and gradient^2: float64, (3, segments).
        self.fit = torch.zeros(3, len(bucket.segments), dtype=torch.float64, device=bucket.device)
        self._before: _Before | None = None
        #: Where segments begin and end among a step's entries: int64, (segments + 1,).
        self._edges: Tensor

    def lay_out(self, selection: Unled) -> None:
        """A step's entries are this selection's from now on."""
        # Made here and not in each step: a GPU would be waited for.
        self._edges = torch.tensor([*selection.first, selection.total], device=self._bucket.device)

    def restart(self) -> None:
        """Nothing is known."""
        for name in self.STATES:
            self._bucket.state[name].zero_()
        self.fit.zero_()
        self._before = None

    def begin(self) -> None:
        """A new step: the last one stands."""
        self._before = None

    def opened(self) -> list[bool]:
        """Segment by segment, whether guesses are applied. (It waits for a GPU.)"""
        dot, guessed, came = self.fit.tolist()
        sums = zip(dot, guessed, came, strict=True)
        return [self._gate <= -1.0 or (g > 0.0 and d >= self._gate * (g * c) ** 0.5) for d, g, c in sums]

    # What is learnt from what arrives.

    def learn(self, selection: Unled, mean: Tensor, waited: Tensor) -> Tensor:
        """``mean`` arrived for the selection's entries, unless it is not finite, ``waited`` steps, float32 (slots,),
        after they were last sent. Returns their gradients per step."""
        state, arrived = self._bucket.state, mean[:1].isfinite()
        known = {name: selection.read(state[name]) for name in ("arrived", "trend", "applied")}
        self._before = _Before(selection, arrived, known, self.fit.clone())
        rate = torch.where(arrived, (mean + known["applied"]) / waited, known["arrived"])
        new = known["trend"] * self._smoothing + rate * (1.0 - self._smoothing)
        selection.write(state["arrived"], rate)
        selection.write(state["trend"], torch.where(arrived, new, known["trend"]))
        # By sums of squares, which are the same bits on all ranks; a dot product's are not.
        guess = selection.read(state["guess"])
        both, one, other = (Moments(x, self._edges).square for x in (guess + rate, guess, rate))
        seen = torch.stack([(both - one - other) / 2, one, other])
        self.fit.copy_(torch.where(arrived, self.fit * _DECAY + seen, self.fit))
        return rate

    # What is predicted.

    def refresh(self, selection: Unled, fresh: Tensor, step: int, last_sent: Tensor) -> None:
        """New guesses for those windows whose turn it is: a ``period``-th of all. ``fresh``: what has just arrived for
        the selection's entries, per step."""
        bucket, state, before = self._bucket, self._bucket.state, self._under_way()
        here, mask = torch.zeros_like(state["guess"]), torch.zeros_like(state["guess"])
        selection.write(here, fresh)
        selection.write(mask, torch.ones_like(fresh))
        weights = flat_weights(bucket)
        sizes, units = root_mean_squares(bucket, weights, state["arrived"])
        for position, (segment, opened) in enumerate(zip(bucket.segments, self.opened(), strict=True)):
            every = self._period if opened else max(self._period, segment.blocks // _PROBES)
            if step % every >= segment.blocks:
                continue
            windows = torch.arange(step % every, segment.blocks, every, device=bucket.device)
            weight = torch.nn.functional.pad(weights[position], (0, segment.blocks * BLOCK - segment.numel))
            age = ((step - segment.of(last_sent)) / self._period).clamp(max=_OLD)
            values = [segment.of(x) / units[position] for x in (here, state["arrived"], state["trend"])]
            parts = (values[0], segment.of(mask), age, *values[1:], weight / sizes[position])
            seen = fields(*(part.view(-1, BLOCK)[windows] for part in parts))
            guesses = segment.of(state["guess"]).view(-1, BLOCK)
            before.guesses.append((guesses, windows, guesses[windows]))
            guesses[windows] = self._ask(bucket, position, windows, seen) * units[position]
            segment.padding(state["guess"]).zero_()

    def apply(self, targets: list[Tensor], scale: float) -> None:
        """The guess stands for every entry of an open segment; what was sent is then assigned over it."""
        state, before = self._bucket.state, self._under_way()
        for segment, target, opened in zip(self._bucket.segments, targets, self.opened(), strict=True):
            applied = opened and target.numel() > 0
            before.applied.append(applied)
            if applied:
                guess = torch.where(before.arrived, segment.of(state["guess"]), 0.0)
                segment.of(self._bucket.residual).sub_(guess)
                segment.of(state["applied"]).add_(guess)
                target.as_strided((target.numel(),), (1,)).copy_(guess[: target.numel()] * scale)

    def sent(self, selection: Unled) -> None:
        """Of the selection's entries, nothing waits any more to be compared."""
        applied = self._bucket.state["applied"]
        selection.write(applied, torch.where(self._under_way().arrived, 0.0, selection.read(applied)))

    def undo(self) -> None:
        """The step under way, as far as it came."""
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

    # Taking over another rank's.

    def shared(self) -> list[Tensor]:
        """What all ranks must hold alike in the middle of a step, before :meth:`apply`."""
        known = self._under_way().known
        return [*(self._bucket.state[name] for name in self.STATES), known["arrived"], known["trend"]]

    def take_over(self, right: list[Tensor]) -> Tensor:
        """Another rank's :meth:`shared`. Returns what this rank has applied more than that one: float32, (entries,)."""
        before, applied = self._under_way(), self._bucket.state["applied"]
        own = applied.clone()
        for mine, value in zip(self.shared(), right, strict=True):
            mine.copy_(value)
        before.known["applied"] = before.selection.read(applied)
        # Older guesses may differ; the newer ones do as well, even if the step is undone.
        before.guesses.clear()
        before.fit.zero_()
        self.fit.zero_()
        return own - applied

    def _under_way(self) -> _Before:
        assert self._before is not None, "learn() comes first in a step"
        return self._before
