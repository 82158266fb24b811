"""Several steps of every rank's own between two exchanges: what is averaged are parameters, not gradients.

Where all ranks stood is the ``anchor``; a rank's distance to it is what a residual is in the other mode. What the
ranks agree to send is averaged and becomes the anchor's; what was not sent drifts on, and is in the next distance.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..engine.bucket import Bucket, Segment, fill, is_dense
from ..engine.collectives import allreduce
from ..engine.exchange import Exchange

if TYPE_CHECKING:
    from .sparse import Sparse


class LocalSteps:
    """Drives a :class:`~hvd_compress.sparse.Sparse` from an optimizer's steps instead of from gradients."""

    def __init__(self, method: "Sparse", period: int) -> None:
        self._method, self._period = method, period
        self._count = 0
        self._begun = False
        self._wrapped: Optimizer | None = None
        self._buckets = method.buckets
        sent = {id(segment.parameter) for bucket in self._buckets for segment in bucket.segments}
        rest = [(name, p) for name, p in method.named_parameters() if id(p) not in sent and p.requires_grad]
        for name, p in rest:
            if p.dtype not in (torch.float32, torch.float16, torch.bfloat16) or not is_dense(p):
                raise ValueError(f'{name}: mode="local" takes floats of up to 32 bits without gaps in memory')
        #: What travels whole: norms, biases, small tensors.
        self._rest = fill(rest, 2**24)
        for bucket in self._rest:
            bucket.index += len(self._buckets)
        for bucket in self._everything():
            bucket.add_state("anchor")
        self._averages = [torch.zeros_like(bucket.residual) for bucket in self._buckets]

    def text(self) -> str:
        """For ``__repr__``."""
        return f"local, every {self._period} steps"

    def wrap(self, optimizer: Optimizer) -> Optimizer:
        if self._wrapped is not None:
            raise ValueError("this compressor wraps an optimizer already")
        ours = {id(segment.parameter) for bucket in self._everything() for segment in bucket.segments}
        if not any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
            raise ValueError("wrap: the optimizer holds none of this compressor's parameters")
        if hasattr(optimizer, "_compression"):
            raise ValueError("wrap takes the plain optimizer, not Horovod's: the averaging is done here")
        self._wrapped = optimizer
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        return optimizer

    def anchors(self, bucket: Bucket) -> list[Tensor]:
        """Where all ranks stood, segment by segment, in memory order: float32, (entries,)."""
        return [segment.of(bucket.state["anchor"])[: segment.numel] for segment in bucket.segments]

    def targets(self, bucket: Bucket) -> list[Tensor]:
        """Where a bucket's averages go, segment by segment."""
        average = self._averages[bucket.index]
        return [segment.of(average)[: segment.numel] for segment in bucket.segments]

    def restart(self) -> None:
        """The ranks were formed anew: where they stand at the next step is their anchor."""
        self._begun = False

    def state(self) -> dict[str, Any]:
        anchors = {s.name: s.shaped(b.state["anchor"]).clone() for b in self._rest for s in b.segments}
        return {"count": self._count, "begun": self._begun, "anchors": anchors}

    def check_state(self, state: dict[str, Any]) -> None:
        """Raises ``ValueError`` if it is not of these parameters."""
        ours = {s.name: s.parameter.shape for b in self._rest for s in b.segments}
        if ours != {name: anchor.shape for name, anchor in state["anchors"].items()}:
            raise ValueError("the state holds other parameters that travel whole")

    def load_state(self, state: dict[str, Any]) -> None:
        for bucket in self._rest:
            for segment in bucket.segments:
                segment.shaped(bucket.state["anchor"]).copy_(state["anchors"][segment.name])
        self._count, self._begun = state["count"], state["begun"]

    @torch.no_grad()
    def finish(self) -> None:
        """Averages everything."""
        with self._method.step_of_its_own():
            for bucket in self._everything():
                self._method.launch(bucket, self._whole(bucket))
        self._begun = True

    def _everything(self) -> list[Bucket]:
        return [*self._buckets, *self._rest]

    @torch.no_grad()
    def _before_step(self, *_: object) -> None:
        if self._method.formed_anew() or not self._begun:
            # All ranks begin alike (after an elastic reset by Horovod's state.sync()): that is where they stand.
            self._count = 0
            for bucket in self._everything():
                for segment, anchor in zip(bucket.segments, self.anchors(bucket), strict=True):
                    anchor.copy_(_flat(segment))
            self._begun = True

    def _after_step(self, *_: object) -> None:
        self._count += 1
        if self._count % self._period == 0:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        with self._method.step_of_its_own(self._period):
            for bucket in self._buckets:
                self._measure(bucket)
                self._method.launch(bucket, self._averaged(bucket))
            for bucket in self._rest:
                self._method.launch(bucket, self._whole(bucket))

    def _measure(self, bucket: Bucket) -> None:
        for segment, anchor in zip(bucket.segments, self.anchors(bucket), strict=True):
            distance = segment.of(bucket.residual)[: segment.numel]
            torch.sub(_flat(segment).float(), anchor, out=distance)
            self._method.invalidate(bucket, ~distance.isfinite().all())
            distance.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def _averaged(self, bucket: Bucket) -> Exchange:
        self._averages[bucket.index].zero_()
        yield from self._method.exchange(bucket)
        bucket.state["anchor"].add_(self._averages[bucket.index])
        self._move(bucket)

    def _whole(self, bucket: Bucket) -> Exchange:
        weights = torch.cat([_flat(segment).float() for segment in bucket.segments])
        total = yield allreduce(weights, "dense_tensor", "whole")
        total = total * (1.0 / self._method.ranks)
        place = 0
        for anchor in self.anchors(bucket):
            anchor.copy_(total[place : place + anchor.numel()])
            place += anchor.numel()
        bucket.residual.zero_()
        self._move(bucket)

    def _move(self, bucket: Bucket) -> None:
        """To the anchor, and from there as far as was not said."""
        for segment, anchor in zip(bucket.segments, self.anchors(bucket), strict=True):
            _flat(segment).copy_(anchor + segment.of(bucket.residual)[: segment.numel])


def _flat(segment: Segment) -> Tensor:
    return segment.parameter.detach().as_strided((segment.numel,), (1,))
