"""Every rank picks its own entries and sends them to all others: one bucket, and the codecs that fit."""

import torch

from ..codecs import Codec, CodedGather, codec
from ..codecs.base import invalidate
from ..codecs.coded_gather import GatherChannel
from ..engine.collectives import allgather
from ..engine.exchange import Exchange
from ..selection.base import NOT_SENT, Average, Output
from ..selection.deciders import Decider
from ..selection.each_rank import EachRank
from ..selection.pickers import Blocks, Picker
from .sparse_work import SparseWork


class GatherWork(SparseWork):
    """One bucket of a method in which every rank sends its own entries. The average over all ranks counts zeros where a
    rank has sent none."""

    def decide(self, slots: list[int]) -> Decider:
        return self.each_rank(Blocks(self.bucket, slots))

    def each_rank(self, picker: Picker) -> EachRank:
        """Entries that every rank picks for itself."""
        return EachRank(picker, self._idle, self._agreement)

    def send(self) -> Exchange:
        decider, channel, bucket = self.decider, self.values.channel, self.bucket
        if not isinstance(decider, EachRank):  # density 1
            yield from super().send()
            return
        assert isinstance(channel, GatherChannel)
        indices, values = allgather(decider.encode(self._scoring), "indices"), self.values.payload
        if self.velocity.memory is None:
            decider.picker.gather(bucket.residual, values)
            codes = allgather(channel.encode(values, self.values.invalid), "values")
            places, gathered = yield indices, codes
            places = decider.decode(places, channel.ranks)
        else:  # values depend on the pieces for which other ranks have gradients
            places = decider.decode((yield indices), channel.ranks)
            self.velocity.rest()
            decider.picker.gather(bucket.residual, values)
            gathered = yield allgather(channel.encode(values, self.values.invalid), "values")
        mean, decoded = torch.zeros_like(bucket.residual), torch.empty_like(values)
        for rank, place in enumerate(places):
            channel.decode_rank(gathered, rank, decoded, add=False)
            mean[place] += decoded
        mean *= 1.0 / channel.ranks
        # One invalid rank makes the step invalid for all.
        invalidate(mean, channel.any_invalid(gathered))
        sent = torch.zeros_like(values).masked_fill_(~mean[:1].isfinite(), NOT_SENT)
        sent, error = self._idle.keep(decider.picker, sent, self._unsent(values, channel.quantization_error), values)
        targets = self._basis.targets(bucket.gradients)
        sent = decider.picker.without_missing(sent, targets)
        decider.picker.scatter(bucket.nothing(), self.velocity.memory, Average(sent, error, Output(0.0)))
        self.values.mark_sent()
        self._output().write(bucket, self._idle.silence(mean), targets)
        self._basis.leave(targets, bucket.gradients, self.step.scale)


def gather_codec(values: str | Codec) -> Codec:
    """The codec; raises ``ValueError`` unless every rank sends its own values to all others."""
    found = codec(values)
    if not isinstance(found, CodedGather):
        raise ValueError(
            f"every rank sends its own entries: values have to be gathered, as fp16-gather; got {found.name}"
        )
    return found


def exchanged_codec(exchange: str, values: str | Codec | None, ring: str, gather: str) -> Codec:
    """The codec for an exchange: ``values``, or the default ``ring`` for leaders, whose entries all ranks send, and
    ``gather`` for ranks that each send their own. Raises ``ValueError`` if they do not fit."""
    if exchange not in ("ring", "gather"):
        raise ValueError(f"exchange must be one of gather, ring, got {exchange!r}")
    if exchange == "gather":
        return gather_codec(gather if values is None else values)
    return codec(ring if values is None else values)


def exchanged_work(exchange: str) -> type[SparseWork]:
    """The class of the buckets for an exchange."""
    return GatherWork if exchange == "gather" else SparseWork
