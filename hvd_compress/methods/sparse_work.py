"""One bucket of a sparse method: gradients are added to the residual, and a few of its entries are sent."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..codecs import Averaged, Codec
from ..engine.agreement import Agreement
from ..engine.bucket import Bucket, Piece
from ..engine.collectives import Collectives
from ..engine.exchange import Exchange, together
from ..engine.rng import derive
from ..engine.state import Tree
from ..engine.work import Part, Step, Work
from ..reference import BLOCK
from ..selection.base import Average, Output, Scoring
from ..selection.budget import apportion
from ..selection.deciders import Decider, Leaders, Shared
from ..selection.idle import Idle
from ..selection.pickers import Blocks, Everything, Picker
from ..selection.schedule import Density, check_density
from .basis import Basis
from .block_means import BlockMeans
from .sparse_parts import Shares, Values, Velocity


@dataclass(frozen=True)
class Sending:
    """The arguments of :class:`~hvd_compress.methods.sparse.SparseMethod`."""

    density: Density
    values: Codec
    budget_interval: int
    collectives: Collectives


class SparseWork(Work):
    """One bucket of a sparse method. A subclass may override :meth:`decide`, who picks entries and how, and
    :meth:`send`.

    Args:
        sending: the arguments of the method.
        basis: in which the residual is kept.
        scoring: how entries are scored.
        leaders: how many ranks pick the entries of a block on average; None for all.
        means: whether block means are sent.
        finds_idle: whether a piece for which no rank has a gradient receives 0, instead of the rest of its residual.
        decay: factor of the residual in each step.
        subtract: the share of the payload that leaves the residual.
        sign: whether averages are replaced by their signs.
        parts: further ones, which begin last and are undone first.
    """

    decider: Decider

    def __init__(
        self,
        bucket: Bucket,
        sending: Sending,
        *,
        basis: Basis | None = None,
        scoring: Scoring | None = None,
        leaders: int | None = None,
        means: bool = False,
        finds_idle: bool = False,
        decay: float = 1.0,
        subtract: float = 1.0,
        sign: bool = False,
        **parts: Part,
    ) -> None:
        self._sending, self._basis, self._scoring = sending, basis or Basis(bucket), scoring or Scoring()
        self._leaders, self._decay, self._subtract, self._sign = leaders, decay, subtract, sign
        self._means, self._idle = BlockMeans(bucket, means), Idle(bucket, finds_idle)
        self._agreement = Agreement(bucket.device)
        groups = len(bucket.pieces) + len(self._means.sizes)
        self.values = Values(bucket, sending.values, groups, sending.collectives)
        self.velocity, self._shares = Velocity(bucket, self._basis, self._means, self._idle), Shares(bucket)
        self._no_floors = torch.zeros(0, dtype=torch.float32, device=bucket.device)
        #: The density of the step that began last, and the arguments of the current selection.
        self.density, self._layout = 1.0, tuple[object, ...]()
        own = {"values": self.values, "velocity": self.velocity, "idle": self._idle, "agreement": self._agreement}
        super().__init__(bucket, **own, block_means=self._means, shares=self._shares, **parts)

    # A method may override these.

    def decide(self, slots: list[int]) -> Decider:
        """The decider of the step's entries, with the picker that it uses. ``slots``: of each piece."""
        return self.leaders(Blocks(self.bucket, slots), self._leaders)

    def send(self) -> Exchange:
        """Agrees on the entries, averages them, writes the averages, and subtracts the payload from the residual."""
        yield from self.agree()
        self.apply(*(yield from self.average()))

    def most_slots(self) -> list[int]:
        """The largest number of slots of each piece."""
        return self._shares.sizes

    def importance(self) -> Tensor:
        """The sum of each piece's scores on this rank, for its share of the slots: float64, (pieces,)."""
        bucket, scoring = self.bucket, self._scoring
        if scoring.floors is None:  # coefficients fill the padding, too
            return totals(piece.of(bucket.residual).abs() for piece in bucket.pieces)
        return totals(scoring.score(bucket, index) for index in range(len(bucket.pieces)))

    # Deciders.

    def leaders(self, picker: Picker, leaders: int | None = None) -> Leaders:
        """Entries picked by leaders. ``leaders``: how many ranks share a block on average; None for all."""
        step = self.step
        run = 1 if leaders is None else max(1, math.ceil(self.density * BLOCK / min(leaders, step.ranks)))
        return Leaders(picker, self._idle, self._agreement, run, step.ranks, step.rank)

    def shared(self, picker: Picker) -> Shared:
        """Entries that all ranks compute from shared state."""
        return Shared(picker, self._idle, self._agreement)

    # A step.

    def begin(self, step: Step) -> None:
        super().begin(step)
        self._lay_out()
        self.decider.begin(step)

    def _lay_out(self) -> None:
        """Builds the decider anew if the density, the shares or the ranks have changed."""
        self.density = check_density(self._sending.density(self.step.number))
        layout = (self.density, self.step.ranks, self.step.rank, tuple(self._shares.weights))
        if layout == self._layout:
            return
        sizes = self._shares.sizes
        # At least one slot for each piece: without one it would never be sent.
        total = max(len(sizes), round(self.density * sum(sizes)))
        if total == sum(sizes):
            self.decider = self.shared(Everything(self.bucket))
        else:
            self.decider = self.decide(apportion(total, self._shares.weights, self.most_slots()))
        self._layout, picker = layout, self.decider.picker
        self.values.lay_out([*picker.slots, *self._means.sizes])

    def accumulate(self) -> None:
        bucket, decider, step, scoring = self.bucket, self.decider, self.step, self._scoring
        given = self._basis.enter(bucket.gradients, step.scale, self.values.invalid)
        grads, weights = scoring.weighted(bucket, given)
        picks = isinstance(decider, Leaders) and decider.picker.early
        for velocity, some in self.velocity.split(grads):
            ops.accumulate_select(
                some,
                bucket.residual,
                weights,
                velocity,
                decider.picker.table if picks else bucket.table,
                self._no_floors if scoring.floors is None else scoring.floors,
                decider.own if picks else decider.none,
                self.values.invalid,
                self._idle.touched,
                self._means.fresh if self._means.sizes else None,
                1.0 / step.scale,
                self.velocity.momentum,
                self._decay,
                self._basis.transform,
                *decider.draw(scoring),
            )
        for before, after in zip(given, grads, strict=True):
            if after is not before:
                before.copy_(after)  # the operator has zeroed the copy

    def exchange(self) -> Exchange:
        # Before entries are subtracted from the residual.
        importance = self.importance() if self.step.every(self._sending.budget_interval) else None
        parts = [self.send()]
        if importance is not None:
            parts.append(self._shares.follow(importance))
        yield from together(parts)

    def agree(self) -> Exchange:
        """Yields requests until all ranks know the same entries."""
        yield from self.decider.agree(self._scoring, self.values.channel.first_requests())
        self.velocity.rest()

    def average(self) -> Averaged:
        """Averages the picked entries and the block means over the ranks. Returns the mean and the error that stays in
        this rank's residual: float32, (slots,)."""
        picker, payload = self.decider.picker, self.values.payload
        total = picker.total
        sent = picker.gather(self.bucket.residual, payload[:total])
        velocity, invalid = self.velocity, self.values.invalid
        self._means.load(payload[total:], velocity.momentum, velocity.without, invalid, self._idle.blocks)
        mean, error = yield from self.values.average(payload, derive(picker.key, self.step.rank))
        self._mean_of_blocks = self._means.receive(mean[total:], error[total:])
        return self._idle.keep(picker, mean[:total], self._unsent(sent, error[:total]), sent)

    def _unsent(self, sent: Tensor, error: Tensor) -> Tensor:
        """The part of ``sent`` values, of quantization ``error``, that stays in the residual: float32, (slots,)."""
        return error if self._subtract == 1.0 else torch.lerp(sent, error, self._subtract)

    def apply(self, mean: Tensor, error: Tensor) -> None:
        """Writes the averages of the picked entries to the gradients, and ``error`` to the residual. A piece without a
        gradient keeps its residual. (Hosts pass the same parameters on all ranks, so it is missing on all.)"""
        picker, grads = self.decider.picker, self.bucket.gradients
        targets = self._basis.targets(grads)
        mean = picker.without_missing(mean, targets)
        picker.scatter(targets, self.velocity.memory, Average(mean, error, self._output(), self._mean_of_blocks))
        self._basis.leave(targets, grads, self.step.scale)

    def _output(self) -> Output:
        return Output(self.step.scale, self._basis.transform, self._sign)

    def undo(self) -> None:
        sent = self.values.sent
        super().undo()
        if sent:
            # A mean of 0 with the sent values as error: they are written to the residual, and no gradient is.
            picker, payload = self.decider.picker, self.values.payload
            values = payload[: picker.total]
            average = Average(torch.zeros_like(values), values, Output(0.0))
            picker.scatter(self.bucket.nothing(), self.velocity.memory, average)
            self._means.unsent.copy_(payload[picker.total :])

    # Between steps.

    def restart(self) -> None:
        super().restart()
        self.density, self._layout = 1.0, ()

    def saved(self, residual: Tensor) -> Tree:
        return self._basis.saved(residual)

    def residual_of(self, piece: Piece) -> Tensor:
        entries, means = self._basis.entries(piece, piece.of(self.bucket.residual)), self._means
        return means.added(piece, entries, means.unsent + means.fresh)

    def set_residual(self, piece: Piece, entries: Tensor) -> None:
        self._basis.write(piece, entries, piece.of(self.bucket.residual).zero_())
        self._means.clear(piece)

    def scale_residual(self, factor: float) -> None:
        super().scale_residual(factor)
        self._means.unsent.mul_(factor)


def totals(scores: Iterable[Tensor]) -> Tensor:
    return torch.stack([score.sum(dtype=torch.float64) for score in scores])
