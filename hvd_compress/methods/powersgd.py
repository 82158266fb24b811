"""Low-rank compression (PowerSGD: Vogels, Karimireddy & Jaggi, NeurIPS 2019)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..codecs.cast import Cast
from ..engine.arguments import NamedParameters
from ..engine.bucket import Bucket, Segment
from ..engine.collectives import allreduce
from ..engine.exchange import Exchange
from ..engine.rng import derive
from ..engine.state import Fixed, TensorLeaf, Tree
from ..reference import OVERFLOW, usable
from .base import Compressor


class PowerSGD(Compressor):
    r"""PowerSGD: each gradient matrix is replaced by a product of two thin matrices, by one step of power iteration.

    Implements Vogels, Karimireddy & Jaggi, *PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization* (NeurIPS 2019). On rank i, for one parameter with gradient g_i and residual r_i, both as n x m
    matrices (the first dimension by all others), and Q, m x rank, equal on all ranks::

        M_i = r_i + g_i
        P   = orthonormalise(mean_i M_i Q)            one allreduce a bucket; columns of Q scaled to norm 1
        Q   = mean_i M_i^T P                          another one; Q is kept for the next step
        g   = P Q^T
        r_i = M_i - P (M_i^T P)^T

    Ours: :func:`torch.linalg.qr` instead of Gram-Schmidt; matrices that would not get smaller, sent complete with the
    first factor; factors in float16, clamped so that the sum cannot overflow (the residual keeps the rest); gradients
    that are not finite never enter residual or Q. The rest is the paper's; torch's own hook subtracts the average from
    the residual instead of a rank's own projection.

    Replicas stay bit-equal if all ranks compute the same orthonormalisation: on one type of processor.

    Args:
        rank: of the approximation, at least 1.
        values: how factors are sent, ``"fp16"`` or ``"fp32"``.
        error_feedback: keep the approximation error for the next step.
        warm_start: start each step's iteration from the last Q; otherwise from a random one.

    Other arguments, and errors: see :class:`~hvd_compress.Compressor`.
    """

    def __init__(
        self,
        named_parameters: NamedParameters,
        rank: int = 4,
        *,
        values: str = "fp16",
        error_feedback: bool = True,
        warm_start: bool = True,
        **common: Any,
    ) -> None:
        if rank < 1:
            raise ValueError(f"rank must be at least 1, got {rank}")
        if values not in ("fp16", "fp32"):
            raise ValueError(f"values must be fp16 or fp32, got {values!r}")
        super().__init__(named_parameters, **common)
        self._rank, self._cast = rank, Cast(values)
        #: From here on a gradient counts as infinite. Factors in float16 would need many steps to send a larger one.
        self._overflow = 2.0**22 if values == "fp16" else OVERFLOW
        self._error_feedback, self._warm_start = error_feedback, warm_start
        #: Per bucket: Q of each segment, (m, rank), or None for one that is sent complete.
        self._q = [[self._random_q(b, i, 0) for i in range(len(b.segments))] for b in self.buckets]
        #: Per bucket: whether a gradient of this step is not finite: bool, ().
        self._invalid = [torch.zeros((), dtype=torch.bool, device=b.device) for b in self.buckets]
        #: Per bucket, for undo(): what has left the residual, and Q before the step.
        self._sent: list[tuple[list[Tensor | None], list[Tensor | None]] | None] = [None] * len(self.buckets)

    def begin(self, bucket: Bucket) -> None:
        self._invalid[bucket.index].zero_()
        self._sent[bucket.index] = None
        if not self._error_feedback:
            bucket.residual.zero_()

    def receive(self, bucket: Bucket, position: int, grad: Tensor) -> None:
        residual = bucket.segments[position].shaped(bucket.residual)
        step = grad.float() / self.scale
        fits = usable(step, self._overflow)
        self._invalid[bucket.index] |= ~fits.all()
        residual.add_(torch.where(fits, step, 0.0))

    def exchange(self, bucket: Bucket) -> Exchange:
        old_q = self._q[bucket.index]
        if not self._warm_start:
            old_q = [self._random_q(bucket, i, self.step) for i in range(len(bucket.segments))]
        matrices = [_matrix(segment, bucket.residual) for segment in bucket.segments]
        # Columns of norm 1: P has the gradient's magnitude, not its square, which float16 could not hold.
        pairs = zip(matrices, old_q, strict=True)
        products = [m if q is None else m @ torch.nn.functional.normalize(q, dim=0) for m, q in pairs]
        flag = bucket.residual.new_zeros(1).masked_fill_(self._invalid[bucket.index], torch.nan)
        payload = self._pack([flag, *products])
        sums = yield allreduce(payload, then="encode")
        valid, *p = self._unpack(sums, [flag, *products], 1.0 / self.ranks)
        valid, own = valid.isfinite(), self._unpack(payload, [flag, *products])[1:]
        p = [x if q is None else torch.linalg.qr(x)[0] for x, q in zip(p, old_q, strict=True)]
        new_q = old_q
        if products := [m.T @ x for m, x, q in zip(matrices, p, old_q, strict=True) if q is not None]:
            payload = self._pack(products)
            means = iter(self._unpack((yield allreduce(payload)), products, 1.0 / self.ranks))
            owns = iter(self._unpack(payload, products))
            new_q = [None if q is None else torch.where(valid, next(means), q) for q in old_q]
            own = [o if q is None else x @ next(owns).T for o, x, q in zip(own, p, old_q, strict=True)]
        averages = [x if q is None else x @ q.T for x, q in zip(p, new_q, strict=True)]
        sent: list[Tensor | None] = [None] * len(averages)
        for i, (segment, target) in enumerate(zip(bucket.segments, bucket.targets(), strict=True)):
            if target.numel():  # else no gradient arrived, and the residual stays
                residual = segment.shaped(bucket.residual)
                contribution = sent[i] = torch.where(valid, own[i].view(residual.shape), 0.0)
                residual.sub_(contribution)
                target.copy_(torch.where(valid, averages[i].view(residual.shape) * self.scale, torch.nan))
        if not self._error_feedback:
            bucket.residual.zero_()
            sent = [None] * len(sent)
        self._sent[bucket.index], self._q[bucket.index] = (sent, old_q), new_q

    def undo(self, bucket: Bucket) -> None:
        if (before := self._sent[bucket.index]) is not None:
            sent, self._q[bucket.index] = before
            for segment, average in zip(bucket.segments, sent, strict=True):
                if average is not None:
                    segment.shaped(bucket.residual).add_(average)
            self._sent[bucket.index] = None

    def restart(self, bucket: Bucket) -> None:
        self._q[bucket.index] = [self._random_q(bucket, i, 0) for i in range(len(bucket.segments))]
        self._sent[bucket.index] = None

    def method_state(self) -> dict[str, Tree]:
        q = {s.name: q for b in self.buckets for s, q in zip(b.segments, self._q[b.index], strict=True)}
        return {
            "made_with": {"rank": Fixed(self._rank), "error feedback": Fixed(self._error_feedback)},
            "q": {name: TensorLeaf(tensor) for name, tensor in q.items() if tensor is not None},
        }

    def _random_q(self, bucket: Bucket, position: int, step: int) -> Tensor | None:
        n, m = _matrix(bucket.segments[position], bucket.residual).shape
        rank = min(self._rank, n, m)
        if rank * (n + m) >= n * m:
            return None
        generator = torch.Generator("cpu").manual_seed(derive(self.engine.seed, step, bucket.index, position))
        q = torch.randn(m, rank, generator=generator, dtype=torch.float32, device="cpu")
        return q.to(bucket.device)

    def _pack(self, tensors: Sequence[Tensor]) -> Tensor:
        limit = self._cast.limit(self.ranks)  # the sum must not overflow; the residual keeps the rest
        return torch.cat([x.flatten() for x in tensors]).clamp(-limit, limit).to(self._cast.dtype)

    def _unpack(self, flat: Tensor, like: Sequence[Tensor], factor: float = 1.0) -> list[Tensor]:
        parts = torch.split(flat.float() * factor, [x.numel() for x in like])
        return [part.view(x.shape) for part, x in zip(parts, like, strict=True)]


def _matrix(segment: Segment, flat: Tensor) -> Tensor:
    return segment.shaped(flat).flatten(1)
