"""The base class of methods that send a few entries of the residual in each step."""

import abc
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..codecs import Codec, codec, gather_codec
from ..codecs.base import invalidate
from ..codecs.packed_channels import GatherChannel
from ..engine.arguments import NamedParameters, check_flag, check_integer
from ..engine.bucket import Bucket, strides_of
from ..engine.collectives import allgather, allreduce
from ..engine.exchange import Exchange
from ..engine.guard import Traits
from ..engine.state import Entry, Fixed, Tree
from ..engine.work import Part
from ..selection.base import NOT_SENT, Average, Output, marked, missing
from ..selection.budget import SPREAD, apportion, shares
from ..selection.deciders import Decider, EachRank, Leaders, run_length
from ..selection.pickers import Blocks, Everything, Picker
from ..selection.schedule import Density, check_density, warm_up
from .feedback import FeedbackWork, Wire
from .momentum import MomentumMethod


class Shares(Part):
    """Each piece's share of a bucket's slots."""

    def __init__(self, bucket: Bucket) -> None:
        self._pieces = bucket.pieces
        self.sizes = [piece.numel for piece in bucket.pieces]
        self.restart()

    def restart(self) -> None:
        self.weights = [float(size) for size in self.sizes]

    def follow(self, importance: Tensor) -> Exchange:
        """Shares by importance: float64, (pieces,), the sum of each piece's scores on this rank. Summed over ranks, so
        that every rank computes its slots from the same bits."""
        agreed = yield allreduce(importance.nan_to_num_(nan=0.0, posinf=0.0), "budget", "shares")
        self.weights = shares(agreed.tolist(), self.sizes)

    def state(self) -> Tree:
        return {
            piece.name: Entry(self.weights, i, float, piece.numel / SPREAD, piece.numel * SPREAD)
            for i, piece in enumerate(self._pieces)
        }


@dataclass(frozen=True)
class Sending:
    """How many entries a method sends, and how. ``budget_interval``: steps between updates of the pieces' shares."""

    density: Density
    wire: Wire
    budget_interval: int = 0


class SparseWork(FeedbackWork):
    """One bucket of a sparse method. A subclass says in :meth:`exchange` what is sent, and how it is picked.

    Args:
        sending: how many entries are sent, and how.
        others: those of ``FeedbackWork`` (``methods/feedback.py``): the basis, block means, scoring, further parts.
    """

    def __init__(self, bucket: Bucket, sending: Sending, **others: Any) -> None:
        self._sending, self.shares = sending, Shares(bucket)
        #: What the selection was built from.
        self._layout: tuple[object, ...] = ()
        super().__init__(bucket, sending.wire, shares=self.shares, **others)

    @abc.abstractmethod
    def decide(self, slots: list[int]) -> Decider:
        """Chooses who decides, and how entries are picked. ``slots``: of each piece."""

    def most_slots(self) -> list[int]:
        """The most slots that each piece can have."""
        return self.shares.sizes

    def importance(self) -> Tensor:
        """The sum of each piece's scores on this rank, for its share of the slots: float64, (pieces,)."""
        bucket, scoring = self.bucket, self.scoring
        if scoring.floors is None:  # coefficients fill the padding, too
            scores = [piece.of(bucket.residual).abs() for piece in bucket.pieces]
        else:
            scores = [scoring.score(bucket, index) for index in range(len(bucket.pieces))]
        return totals(scores)

    @property
    def sparse(self) -> bool:
        """Whether the last step that began has a density below 1."""
        return self._layout[:1] not in ((), (1.0,))

    def leaders(self, picker: Picker, leaders: int | None) -> Leaders:
        """``leaders`` ranks, on average, that share a block; None for all."""
        step = self.step
        run = run_length(leaders, self.density, step.ranks)
        return Leaders(picker, self.idle, self.agreement, run, step.ranks, step.rank)

    def each_rank(self, picker: Picker) -> EachRank:
        """Every rank for itself."""
        return EachRank(picker, self.idle, self.agreement)

    def lay_out(self) -> None:
        self.density = check_density(self._sending.density(self.step.number))
        layout = (self.density, self.step.ranks, self.step.rank, tuple(self.shares.weights))
        if layout == self._layout:
            return
        sizes = self.shares.sizes
        # At least one slot for each piece: without one it would never be sent.
        total = max(len(sizes), round(self.density * sum(sizes)))
        if total == sum(sizes):
            self.decider: Decider = self.shared(Everything(self.bucket))
        else:
            self.decider = self.decide(apportion(total, self.shares.weights, self.most_slots()))
        self._layout, picker = layout, self.decider.picker
        counts = picker.slots if self.wire.layerwise else [picker.total]
        self.values.lay_out([*counts, *(piece.blocks for piece in self.bucket.pieces if self.means is not None)])

    def restart(self) -> None:
        super().restart()
        self._layout = ()

    # Parts of exchanges.

    def send(self) -> Exchange:
        yield from self._send_each() if self.decider.each_rank else super().send()

    def _send_each(self) -> Exchange:
        """Every rank's own entries: their mean over all ranks, with zeros where a rank did not send."""
        decider, channel, bucket, invalid = self.decider, self.values.channel, self.bucket, self.values.invalid
        assert isinstance(decider, EachRank) and isinstance(channel, GatherChannel)
        gathered = yield allgather(decider.encode(self.scoring), "indices")
        places = decider.decode(gathered, channel.ranks)
        values = self.picked()
        gathered = yield allgather(channel.encode(values, invalid), "values")
        mean, decoded = torch.zeros_like(bucket.residual), torch.empty_like(values)
        for rank, place in enumerate(places):
            channel.decode_rank(gathered, rank, decoded, add=False)
            mean[place] += decoded
        mean *= 1.0 / channel.ranks
        # One invalid rank makes the step invalid for all.
        invalidate(mean, channel.any_invalid(gathered))
        sent = torch.zeros_like(values).masked_fill_(~mean[:1].isfinite(), NOT_SENT)
        sent, error = self.idle.keep(decider.picker, sent, self.unsent(values, channel.quantization_error), values)
        targets = self.basis.targets(bucket.gradients)
        sent = marked(sent, map(decider.picker.span, missing(targets)))
        decider.picker.scatter(bucket.nothing(), self.velocity.memory, Average(sent, error, Output(0.0)))
        self.output().write(bucket, self.idle.silence(mean), targets)
        self.basis.leave(bucket.gradients)
        self.values.sent = True

    def due_importance(self) -> Tensor | None:
        """:meth:`importance`, before entries leave the residual, in steps after which the shares follow it."""
        return self.importance() if self.step.every(self._sending.budget_interval) else None

    def share_slots(self, importance: Tensor | None) -> Exchange:
        """The pieces' shares of the slots follow their importance, if it was due."""
        if importance is not None:
            yield from self.shares.follow(importance)


def totals(scores: Iterable[Tensor]) -> Tensor:
    """The sum of each piece's scores: float64, (pieces,)."""
    return torch.stack([score.sum(dtype=torch.float64) for score in scores])


class SparseMethod(MomentumMethod):
    """A method that sends a few entries of the residual; a subclass says which.

    Args:
        density: slots as a share of the entries, in (0, 1], or a function of the step (:mod:`hvd_compress.schedule`).
        values: a codec's name or a codec (:mod:`hvd_compress.codecs`).
        layerwise: one quantization scale per parameter, or one per bucket.
        budget_interval: steps between updates of the parameters' shares of a bucket's slots; 0 keeps them equal.
        warmup_steps: steps over which the density decreases 1/4, 1/16, ... to ``density``.
        momentum: of momentum correction, in [0, 1); see :meth:`take_momentum`.
    """

    works: list[SparseWork]
    #: Whether what is kept depends on the order in which parameters lie in memory.
    _ordered = False

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
        warmup_steps = check_integer("warmup_steps", warmup_steps, 0)
        budget_interval = check_integer("budget_interval", budget_interval, 0)
        layerwise = check_flag("layerwise", layerwise)
        if isinstance(density, type) or not (callable(density) or isinstance(density, Real)):
            raise TypeError(f"density must be a number or a function of the step, got {density!r:.80}")
        if not callable(density):
            density = check_density(density)
        elif warmup_steps:
            raise ValueError("warmup_steps goes with a density that is a number, not with a function")
        # A function is compared between ranks by its name; what it returns, in each step by the selection.
        text = getattr(density, "__qualname__", type(density).__name__) if callable(density) else density
        self._density = density if callable(density) else warm_up(density, warmup_steps)
        self._density_options = {"density": text, "warmup_steps": warmup_steps}
        self._codec, self._layerwise, self._budget_interval = codec(values), layerwise, budget_interval
        super().__init__(named_parameters, momentum=momentum, **common)

    def work(self, bucket: Bucket) -> SparseWork:
        wire = Wire(self._codec, self.collectives, self._layerwise)
        return self.sparse_work(bucket, Sending(self._density, wire, self._budget_interval))

    @abc.abstractmethod
    def sparse_work(self, bucket: Bucket, sending: Sending) -> SparseWork:
        """One bucket of this method."""

    def options(self) -> dict[str, object]:
        own = {"values": self._codec, "layerwise": self._layerwise, "budget_interval": self._budget_interval}
        return {**self._density_options, **own, **super().options()}

    @property
    def traits(self) -> Traits:
        momentum = self.momentum.value
        return Traits(linear=not momentum, momentum=momentum, sparse=any(work.sparse for work in self.works))

    def made_with(self) -> dict[str, Any]:
        """The options that a state depends on, by the name under which an error reports a difference."""
        strides = {p.piece.name: list(strides_of(p.piece.weight())) for p in self.engine.places}
        return {
            "strides (use the same memory_format)": strides if self._ordered else None,
            "values": self._codec.name,
            "layerwise": self._layerwise,
        }

    def state(self) -> dict[str, Tree]:
        made_with: Tree = {what: Fixed(value) for what, value in self.made_with().items()}
        return {"made_with": made_with, **super().state()}


@dataclass(frozen=True)
class Leading:
    """Who picks m of every 256 entries.

    ``exchange``: ``"ring"``: leaders pick entries that all ranks send; ``"gather"``: every rank picks its own and sends
    them to all. Raises ``ValueError``.
    """

    exchange: str

    def __post_init__(self) -> None:
        if self.exchange not in ("ring", "gather"):
            raise ValueError(f"exchange must be one of gather, ring, got {self.exchange!r}")

    def codec(self, values: str | Codec | None, ring: str, gather: str) -> Codec:
        """The codec, by default that of the exchange. Raises ``ValueError`` for one that does not fit."""
        if self.exchange == "gather":
            return gather_codec(gather if values is None else values)
        return codec(ring if values is None else values)

    def decide(self, work: SparseWork, slots: list[int]) -> Decider:
        """See :meth:`SparseWork.decide`."""
        picker = Blocks(work.bucket, slots)
        return work.each_rank(picker) if self.exchange == "gather" else work.leaders(picker, None)
