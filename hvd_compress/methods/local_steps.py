"""Local steps: several optimizer steps of each rank between two exchanges of parameters.

The ``anchor`` holds the common parameters after the last exchange; the residual is a rank's difference to it. The
entries that are sent are averaged and added to the anchor; the rest of the difference stays in the rank's parameters
and is part of the next difference.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..engine.bucket import Bucket, is_dense, make_buckets
from ..engine.collectives import allreduce
from ..engine.exchange import Exchange
from ..engine.state import Entry, Recorded, TensorLeaf, Tree
from ..reference import usable

if TYPE_CHECKING:
    from .sparse import SparseMethod


class LocalSteps:
    """Runs a method's exchanges from an optimizer's steps instead of from gradients."""

    def __init__(self, method: "SparseMethod", period: int) -> None:
        self._method, self._period = method, period
        self._count = 0
        self._begun = False
        self._wrapped: Optimizer | None = None
        self._buckets = method.buckets
        engine = method.engine
        sent = {id(place.segment.parameter) for place in engine.places}
        named = zip(engine.names, engine.parameters, strict=True)
        rest = [(name, p) for name, p in named if id(p) not in sent and p.requires_grad]
        for name, p in rest:
            if p.dtype not in (torch.float32, torch.float16, torch.bfloat16) or not is_dense(p):
                raise ValueError(
                    f'{name}: mode="local" needs a floating dtype of at most 32 bits and memory without gaps'
                )
        #: Parameters that are averaged completely: norms, biases, small tensors.
        self._rest = make_buckets(rest, 2**24)
        for bucket in self._rest:
            bucket.index += len(self._buckets)
        for bucket in [*self._buckets, *self._rest]:
            bucket.add_state("anchor", finite=False)  # as the parameters
        self._averages = [torch.zeros_like(bucket.residual) for bucket in self._buckets]

    def wrap(self, optimizer: Optimizer) -> Optimizer:
        """See :meth:`hvd_compress.SlimDP.wrap`."""
        if self._wrapped is not None:
            raise ValueError("this compressor wraps an optimizer already")
        ours = {id(segment.parameter) for bucket in [*self._buckets, *self._rest] for segment in bucket.segments}
        if not any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
            raise ValueError("wrap: the optimizer holds none of this compressor's parameters")
        if hasattr(optimizer, "_compression"):
            raise ValueError("wrap takes the plain optimizer, not Horovod's")
        self._wrapped = optimizer
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        return optimizer

    def anchors(self, bucket: Bucket) -> list[Tensor]:
        """The common parameters, by segment, in memory order: float32, (entries,)."""
        return [segment.of(bucket.state["anchor"])[: segment.numel] for segment in bucket.segments]

    def targets(self, bucket: Bucket) -> list[Tensor]:
        """Where a bucket's averages are written, by segment."""
        average = self._averages[bucket.index]
        return [segment.of(average)[: segment.numel] for segment in bucket.segments]

    def restart(self) -> None:
        """The set of ranks has changed: the parameters at the next step become the anchor."""
        self._begun = False

    def state(self) -> Tree:
        """The saved state beyond the method's buckets.

        A rank's difference to the anchor is in its parameters, which the user saves: while the parameters differ,
        :func:`hvd_compress.reshard` must refuse the states.
        """
        return {
            "count": Entry(vars(self), "_count", int, low=0),
            "begun": Entry(vars(self), "_begun", bool),
            "anchors": {
                s.name: TensorLeaf(s.shaped(b.state["anchor"]), **b.rules["anchor"])
                for b in self._rest
                for s in b.segments
            },
            "digest of the parameters (call finish() before saving)": Recorded(self._digest),
        }

    def _digest(self) -> int:
        """Equal on all ranks if their parameters are."""
        total = 0
        for bucket in [*self._buckets, *self._rest]:
            for segment in bucket.segments:
                bits = segment.flat_weight().float().view(torch.int32).long()
                place = torch.arange(bits.numel(), device=bits.device) % 8191 + 1
                total = (total * 31 + int((bits * place).sum())) % 2**61
        return total

    @torch.no_grad()
    def finish(self) -> None:
        """Averages all parameters."""
        with self._method.engine.manual_step():
            for bucket in [*self._buckets, *self._rest]:
                self._method.engine.exchanges.launch(bucket, self._whole(bucket))
        self._begun = True

    @torch.no_grad()
    def _before_step(self, *_: object) -> None:
        if self._method.engine.check_generation() or not self._begun:
            # All ranks start with the same parameters (after an elastic reset, by Horovod's state.sync()).
            self._count = 0
            for bucket in [*self._buckets, *self._rest]:
                for segment, anchor in zip(bucket.segments, self.anchors(bucket), strict=True):
                    anchor.copy_(segment.flat_weight())
            self._begun = True

    def _after_step(self, *_: object) -> None:
        self._count += 1
        if self._count % self._period == 0:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        with self._method.engine.manual_step(self._period):
            for bucket in self._buckets:
                self._load_difference(bucket)
                self._method.engine.exchanges.launch(bucket, self._averaged(bucket))
            for bucket in self._rest:
                self._method.engine.exchanges.launch(bucket, self._whole(bucket))

    def _load_difference(self, bucket: Bucket) -> None:
        for segment, anchor in zip(bucket.segments, self.anchors(bucket), strict=True):
            difference = segment.of(bucket.residual)[: segment.numel]
            torch.sub(segment.flat_weight().float(), anchor, out=difference)
            fits = usable(difference)
            self._method.invalidate(bucket, ~fits.all())
            difference.masked_fill_(~fits, 0.0)

    def _averaged(self, bucket: Bucket) -> Exchange:
        average, anchor = self._averages[bucket.index].zero_(), bucket.state["anchor"]
        yield from self._method.exchange(bucket)
        self._set_parameters(bucket, anchor + average)

    def _whole(self, bucket: Bucket) -> Exchange:
        weights = torch.cat([segment.flat_weight().float() for segment in bucket.segments])
        total = yield allreduce(weights, "dense_tensor", "whole")
        common = torch.zeros_like(bucket.state["anchor"])
        sizes = [segment.numel for segment in bucket.segments]
        for segment, part in zip(bucket.segments, torch.split(total * (1.0 / self._method.ranks), sizes), strict=True):
            segment.of(common)[: segment.numel] = part
        bucket.residual.zero_()
        self._set_parameters(bucket, common)

    def _set_parameters(self, bucket: Bucket, common: Tensor) -> None:
        """The anchor becomes ``common``, where that is finite, and the parameters ``common`` plus the part of the
        difference that was not sent. All ranks see a parameter that is not finite; the next exchange is valid again if
        the user then restores it."""
        anchor = bucket.state["anchor"]
        anchor.copy_(torch.where(common.isfinite(), common, anchor))
        for segment in bucket.segments:
            segment.flat_weight().copy_(segment.of(common + bucket.residual)[: segment.numel])
