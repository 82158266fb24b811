"""One bucket of a method with error feedback: gradients enter the residual, and what was sent leaves it."""

import abc
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..codecs import Averaged, Channel, Codec
from ..engine.agreement import Agreement
from ..engine.bucket import Bucket, Piece
from ..engine.collectives import Collectives
from ..engine.exchange import Exchange
from ..engine.rng import derive
from ..engine.state import Tree
from ..engine.work import Part, Step, Work
from ..selection.base import NOT_SENT, Average, Output, Scoring, StepSeed, marked, missing
from ..selection.deciders import Decider, Shared
from ..selection.idle import Idle
from ..selection.pickers import Picker
from .basis import Basis
from .block_means import BlockMeans


class Velocity(Part):
    """The velocity of momentum correction (:mod:`hvd_compress.methods.momentum`), for some pieces of a bucket.

    ``memory``: float32, bucket-wide, or None without momentum. ``momentum``: in [0, 1).
    """

    def __init__(self, bucket: Bucket, basis: Basis) -> None:
        self._bucket, self._basis = bucket, basis
        self.momentum = 0.0
        self.memory: Tensor | None = None
        self._owed: set[str] = set()
        #: The pieces that have none although others have.
        self.without: list[Piece] = []

    def owe(self, momentum: float, names: set[str]) -> None:
        """From now on the pieces with these names have this momentum, the others none; 0 ends it for all."""
        self.momentum, self._owed = momentum, names
        if not momentum:
            self.memory = None
        elif self.memory is None:
            self.memory = self._bucket.zeros()
        self.without = [piece for piece in self._bucket.pieces if momentum and piece.name not in names]

    def split(self, grads: list[Tensor]) -> Iterator[tuple[Tensor | None, list[Tensor]]]:
        """Gradients with their velocity: those of pieces with momentum, and those of the others; empty where they
        belong to the other group."""
        if self.memory is None or not self.without:
            yield self.memory, grads
            return
        for velocity, owed in ((self.memory, True), (None, False)):
            pairs = zip(self._bucket.pieces, self._bucket.nothing(), grads, strict=True)
            yield velocity, [grad if (piece.name in self._owed) == owed else empty for piece, empty, grad in pairs]

    def state(self) -> Tree:
        return {} if self.memory is None else self._basis.saved(self.memory)


class Values(Part):
    """The values that are sent: their codec's channel, and what was sent last.

    Args:
        groups: of values; each has its own scale.
    """

    def __init__(self, bucket: Bucket, codec: Codec, groups: int, collectives: Collectives) -> None:
        self._codec, self._groups, self._collectives, self._device = codec, groups, collectives, bucket.device
        self.invalid = torch.zeros(1, dtype=torch.int32, device=bucket.device)
        #: The picked entries of the residual, then the block means.
        self.payload = torch.empty(0, dtype=torch.float32, device=bucket.device)
        self._sizes: list[int] = []
        self.restart()

    def lay_out(self, sizes: list[int]) -> None:
        """From now on the groups have so many values."""
        if sizes != self._sizes:
            self.payload = torch.empty(sum(sizes), dtype=torch.float32, device=self._device)
            self.channel.set_group_sizes(sizes)
            self._sizes = sizes

    def begin(self, step: Step) -> None:
        self.invalid.zero_()
        self.channel.begin_step()
        self.sent = False

    def average(self, values: Tensor, key: int) -> Averaged:
        """Averages values over the ranks: see :meth:`hvd_compress.codecs.Channel.average`."""
        result = yield from self.channel.average(values, self.invalid, key)
        self.sent = True
        return result

    def undo(self) -> None:
        self.channel.undo_step()

    def restart(self) -> None:
        c = self._collectives
        self.channel: Channel = self._codec.channel(self._groups, c.size, c.rank, self._device)
        self._sizes = []
        #: Whether the last step's values have left the residual: ``payload`` still holds them.
        self.sent = False

    def state(self) -> Tree:
        return self.channel.state()


@dataclass(frozen=True)
class Wire:
    """How a method's values travel: ``layerwise``: one scale per piece, or one per bucket."""

    codec: Codec
    collectives: Collectives
    layerwise: bool


class FeedbackWork(Work):
    """Gradients enter the residual in one call of an operator, which may pick this rank's entries on the way.

    Args:
        wire: how values travel.
        basis: in which the residual is kept.
        means: whether block means are sent.
        finds_idle: whether a piece that no rank has a gradient for receives nothing, instead of the rest of its
            residual.
        decay: factor of the residual in each step.
        scoring: how entries are scored.
        parts: further ones, which begin last and are undone first.
    """

    decider: Decider
    _mean_of_blocks: Tensor | None = None

    def __init__(
        self,
        bucket: Bucket,
        wire: Wire,
        *,
        basis: Basis | None = None,
        means: bool = False,
        finds_idle: bool = False,
        decay: float = 1.0,
        scoring: Scoring | None = None,
        **parts: Part,
    ) -> None:
        self.basis, self.scoring, self.decay, self.wire = basis or Basis(bucket), scoring or Scoring(), decay, wire
        self.means, self.idle = BlockMeans(bucket) if means else None, Idle(bucket, finds_idle)
        groups = (len(bucket.pieces) if wire.layerwise else 1) + len(bucket.pieces) * means
        self.values = Values(bucket, wire.codec, groups, wire.collectives)
        self.velocity, self.agreement = Velocity(bucket, self.basis), Agreement(bucket.device)
        self._no_floors = torch.zeros(0, dtype=torch.float32, device=bucket.device)
        optional = {} if self.means is None else {"block_means": self.means}
        own = {"values": self.values, "velocity": self.velocity, "idle": self.idle, "agreement": self.agreement}
        super().__init__(bucket, **own, **optional, **parts)

    # A step.

    def begin(self, step: Step) -> None:
        super().begin(step)
        self.lay_out()
        self.decider.begin(StepSeed.draw(step, self.bucket.index))

    @abc.abstractmethod
    def lay_out(self) -> None:
        """Makes what depends on the density, if that has changed."""

    def shared(self, picker: Picker) -> Shared:
        """Entries that all ranks compute from shared state."""
        return Shared(picker, self.idle, self.agreement)

    def accumulate(self) -> None:
        bucket, decider, step = self.bucket, self.decider, self.step
        given = self.basis.enter(bucket.gradients, step.scale, self.values.invalid)
        grads, weights = self._weighted(given)
        picks = decider.leads and decider.picker.early
        for velocity, some in self.velocity.split(grads):
            ops.accumulate_select(
                some,
                bucket.residual,
                weights,
                velocity,
                decider.picker.table if picks else bucket.table,
                self._no_floors if self.scoring.floors is None else self.scoring.floors,
                decider.own if picks else decider.none,
                self.values.invalid,
                self.idle.touched,
                None if self.means is None else self.means.fresh,
                1.0 / step.scale,
                self.velocity.momentum,
                self.decay,
                self.basis.transform,
                *decider.draw(self.scoring),
            )
        for before, after in zip(given, grads, strict=True):
            if after is not before:
                before.copy_(after)  # zeros, unless scatter() writes all of it

    def _weighted(self, grads: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The gradients and the weights by which they are scored, in one dtype."""
        if self.scoring.floors is None:
            return grads, []
        weights = [piece.weight() for piece in self.bucket.pieces]
        mixed = [g.numel() > 0 and g.dtype != w.dtype for g, w in zip(grads, weights, strict=True)]
        if any(mixed):
            grads = [g.float() if m else g for g, m in zip(grads, mixed, strict=True)]
            weights = [w.float() if m else w for w, m in zip(weights, mixed, strict=True)]
        return grads, weights

    def picked(self) -> Tensor:
        """The picked entries of the residual: float32, (slots,)."""
        picker = self.decider.picker
        return picker.gather(self.bucket.residual, self.values.payload[: picker.total])

    def average(self, values: Tensor) -> Averaged:
        """Averages ``values`` of the picked entries over the ranks, and the block means with them. Returns the mean and
        this rank's quantization error: float32, (slots,)."""
        picker, means, payload = self.decider.picker, self.means, self.values.payload
        total = picker.total
        if means is not None:
            for piece in self.velocity.without:
                piece.of_blocks(means.velocity).zero_()
            means.load(payload[total:], self.velocity.momentum, self.values.invalid)
            values = payload
        mean, error = yield from self.values.average(values, derive(self.decider.seed.key, self.step.rank))
        if means is not None:
            self._mean_of_blocks = mean[total:]
            for piece in self.bucket.missing():
                piece.of_blocks(self._mean_of_blocks).fill_(NOT_SENT)
            means.keep_error(self._mean_of_blocks, error[total:])
        sent = payload[:total]
        return self.idle.keep(picker, mean[:total], self.unsent(sent, error[:total]), sent)

    def unsent(self, sent: Tensor, error: Tensor) -> Tensor:
        """What stays in the residual of values that were sent, with this quantization error: float32, (slots,)."""
        return error

    def apply(self, mean: Tensor, error: Tensor, output: Output) -> None:
        """Writes averages of the picked entries to the gradients; what was sent of them leaves the residual. What
        nobody receives stays there. (Hosts pass the same parameters on all ranks, so a gradient is missing on all.)"""
        picker, targets = self.decider.picker, self.basis.targets(self.bucket.gradients)
        mean = marked(mean, map(picker.span, missing(targets)))
        picker.scatter(targets, self.velocity.memory, Average(mean, error, output, self._mean_of_blocks))
        self.basis.leave(self.bucket.gradients)

    def output(self) -> Output:
        """How averages become gradients; by default times the loss scale."""
        return Output(self.step.scale, self.basis.transform)

    def send(self) -> Exchange:
        """Agrees on the entries and averages them; writes the averages, and what was sent leaves the residual."""
        yield from self.decider.agree(self.scoring)
        mean, error = yield from self.average(self.picked())
        self.apply(mean, error, self.output())

    def undo(self) -> None:
        super().undo()
        if not self.values.sent:
            return
        # A mean of 0 with the sent values as quantization error: they return to the residual, no gradient is written.
        picker, payload = self.decider.picker, self.values.payload
        sent = payload[: picker.total]
        average = Average(torch.zeros_like(sent), sent, Output(0.0))
        picker.scatter(self.bucket.nothing(), self.velocity.memory, average)
        if self.means is not None:
            self.means.put_back(payload[picker.total :])
        self.values.sent = False

    # Between steps.

    def saved(self, residual: Tensor) -> Tree:
        return self.basis.saved(residual)

    def held(self, piece: Piece) -> Tensor:
        entries, means = self.basis.entries(piece, piece.of(self.bucket.residual)), self.means
        return entries if means is None else entries + means.spread(piece, means.unsent + means.fresh)

    def hold(self, piece: Piece, entries: Tensor) -> None:
        part = piece.of(self.bucket.residual).zero_()
        self.basis.write(piece, entries, part)
        if self.means is not None:
            piece.of_blocks(self.means.unsent).zero_()
            piece.of_blocks(self.means.fresh).zero_()

    def velocity_of(self, piece: Piece) -> Tensor:
        """The velocity of a piece, in its shape: float32."""
        assert self.velocity.memory is not None, "there is no momentum"
        entries, means = self.basis.entries(piece, piece.of(self.velocity.memory)), self.means
        return entries if means is None else entries + means.spread(piece, means.velocity)

    def set_velocity(self, piece: Piece, velocity: Tensor) -> None:
        """Replaces it."""
        assert self.velocity.memory is not None, "there is no momentum"
        self.basis.write(piece, velocity, piece.of(self.velocity.memory))
        if self.means is not None:
            piece.of_blocks(self.means.velocity).zero_()

    def end_momentum(self) -> None:
        """No piece has a momentum any more."""
        self.velocity.owe(0.0, set())
        if self.means is not None:
            self.means.velocity.zero_()

    def scale_residual(self, factor: float) -> None:
        super().scale_residual(factor)
        if self.means is not None:
            self.means.unsent.mul_(factor)
