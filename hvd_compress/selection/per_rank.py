"""Each rank selects and sends its own entries to all others by two allgathers, of indices and of values: what papers
without a ring do. The bytes grow with the number of ranks."""

import abc
import math
from dataclasses import replace

import torch
from torch import Tensor

from ..codecs import Channel, Codec, CodedGather, codec
from ..codecs.packed_channels import GatherChannel
from ..engine.bucket import Bucket
from ..engine.collectives import allgather
from ..engine.exchange import Exchange
from ..reference import BLOCK, flat_positions
from .base import Average, Output, Scoring, StepSeed
from .leaders import BlockLeaders, LeaderSelection, TopkLeaders


def gather_codec(values: str | Codec) -> Codec:
    """The codec; raises ``ValueError`` unless it sends every rank's own values to all others."""
    found = codec(values)
    if not isinstance(found, CodedGather):
        raise ValueError(
            f"every rank sends its own entries: values have to be gathered, as fp16-gather; got {found.name}"
        )
    return found


class PerRankSelection(LeaderSelection):
    """Entries that this rank selects for itself, as the only leader."""

    def __init__(self, bucket: Bucket, slots: list[int], finds_idle: bool = False) -> None:
        super().__init__(bucket, slots, run=1, ranks=1, rank=0, finds_idle=finds_idle)

    def begin_step(self, seed: StepSeed, check: bool) -> None:
        super().begin_step(replace(seed, order=[0]), check)

    def encode(self, scoring: Scoring) -> Tensor:
        """This rank's message: the head and its indices."""
        self.complete(scoring)
        # A copy: the next step's indices are written while the update for these may still be deferred.
        self.indices = self.own_indices[: self.total].clone()
        return self.message

    def decode(self, gathered: Tensor, ranks: int, scoring: Scoring) -> list[Tensor]:
        """Each rank's entries as positions in the bucket's flat memory, in slot order: int64, (slots,). Raises as
        :meth:`indices_by_rank`."""
        return [self.decode_rank(row) for row in self.indices_by_rank(gathered, ranks, scoring)]

    @abc.abstractmethod
    def decode_rank(self, indices: Tensor) -> Tensor:
        """One rank's entries, from the indices in its message."""


class BlockPerRank(PerRankSelection, BlockLeaders):
    """m of every 256 entries."""

    def __init__(self, bucket: Bucket, slots: list[int], finds_idle: bool = False) -> None:
        super().__init__(bucket, slots, finds_idle)
        self.rows = self.segments.cpu()  # read by the host in every step: on a GPU it would synchronise
        #: Whether indices are sent as one bit for every entry of the bucket: where that is shorter.
        self.as_bitmap = self.total * 8 > bucket.blocks * BLOCK

    def begin_step(self, seed: StepSeed, check: bool) -> None:
        super().begin_step(seed, check)
        #: Where each slot's block begins in the bucket's flat memory: the same on all ranks.
        self.base = flat_positions(torch.zeros_like(self.own_indices[: self.total]), self.rows, self.phase)

    def encode(self, scoring: Scoring) -> Tensor:
        message = super().encode(scoring)
        if not self.as_bitmap:
            return message
        bits = torch.zeros(self.bucket.blocks * BLOCK, dtype=torch.uint8, device=self.bucket.device)
        bits[self.base + self.indices] = 1
        weight = 1 << torch.arange(8, device=bits.device, dtype=torch.uint8)
        return torch.cat([message[: self.head], (bits.view(-1, 8) * weight).sum(1, dtype=torch.uint8)])

    def decode_rank(self, indices: Tensor) -> Tensor:
        if not self.as_bitmap:
            return self.base + indices[: self.total]
        shift = torch.arange(8, device=indices.device, dtype=torch.uint8)
        # A block's slots are in ascending order, and so are the set bits. Their number is known: counting them would
        # synchronise a GPU.
        return ((indices[:, None] >> shift) & 1).view(-1).nonzero_static(size=self.total).view(-1)


class TopkPerRank(PerRankSelection, TopkLeaders):
    """The largest entries of every parameter, exactly."""

    def decode_rank(self, indices: Tensor) -> Tensor:
        return indices[: self.total].long()


class SampledPerRank(TopkPerRank):
    """The largest entries, found as in DGC (Lin et al., 2018): a sample gives a threshold, and only the entries above
    it are sorted. (Their number depends on the data, so this synchronises a GPU.)"""

    #: The threshold is set to let through this many times more entries than needed, so that they are seldom too few.
    MARGIN = 1.3
    MIN_SAMPLE = 64

    def __init__(self, bucket: Bucket, slots: list[int], sample: float) -> None:
        super().__init__(bucket, slots)
        self.sample = sample

    def largest(self, position: int, score: Tensor, count: int) -> Tensor:
        if count == 0:
            return super().largest(position, score, count)
        stride = max(1, score.numel() // max(round(self.sample * score.numel()), self.MIN_SAMPLE))
        sampled = score[self.phase % stride :: stride]
        rank = min(math.ceil(self.MARGIN * count * sampled.numel() / score.numel()), sampled.numel())
        threshold = sampled.topk(rank).values[-1]
        above = (score >= threshold).nonzero().view(-1)
        if above.numel() < count:
            return super().largest(position, score, count)
        return above[score[above].topk(count).indices]


def average_per_rank(
    selection: PerRankSelection,
    channel: Channel,
    scoring: Scoring,
    targets: list[Tensor],
    velocity: Tensor | None,
    output: Output,
) -> Exchange:
    """An exchange of every rank's own entries: their mean over all ranks, with zeros where a rank did not send, is
    written to ``targets``, and what was sent leaves the residual."""
    assert isinstance(channel, GatherChannel)
    bucket = selection.bucket
    gathered = yield allgather(selection.encode(scoring), "indices")
    places = selection.decode(gathered, channel.ranks, scoring)
    values = selection.gather(bucket.residual)
    gathered = yield allgather(channel.encode(values, scoring.invalid), "values")
    mean, decoded = torch.zeros_like(bucket.residual), torch.empty_like(values)
    for rank, place in enumerate(places):
        channel.decode_rank(gathered, rank, decoded, add=False)
        mean[place] += decoded
    mean *= 1.0 / channel.ranks
    # One invalid rank makes the step invalid for all.
    mean.masked_fill_(channel.any_invalid(gathered), float("nan"))
    # The residual: NaN keeps what was not sent after all.
    sent = torch.zeros_like(values).masked_fill_(~mean[:1].isfinite(), float("nan"))
    sent, error = selection.keep_idle(sent, channel.quantization_error)
    selection.scatter(bucket.no_targets(), velocity, Average(selection.skip_missing(targets, sent), error, Output(0.0)))
    output.write(bucket, selection.silence_idle(mean), targets)
