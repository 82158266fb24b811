"""Low-rank compression (PowerSGD: Vogels, Karimireddy & Jaggi, NeurIPS 2019)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..codecs.cast import Cast
from ..engine.arguments import NamedParameters, check_flag, check_integer
from ..engine.bucket import Bucket, Piece
from ..engine.collectives import allreduce
from ..engine.exchange import Exchange
from ..engine.rng import derive
from ..engine.state import Fixed, TensorLeaf, Tree
from ..engine.work import Step, Work
from ..methods.base import Compressor
from ..reference import OVERFLOW, usable


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

    Example::

        compression = hvd_compress.PowerSGD(model, rank=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(compression, hvd_compress.ddp_hook)

    Args:
        rank: of the approximation, at least 1.
        values: how factors are sent, ``"fp16"`` or ``"fp32"``.
        error_feedback: keep the approximation error for the next step.

    Other arguments, and errors: see :class:`~hvd_compress.Compressor`.
    """

    def __init__(
        self,
        named_parameters: NamedParameters,
        rank: int = 4,
        *,
        values: str = "fp16",
        error_feedback: bool = True,
        **common: Any,
    ) -> None:
        if values not in ("fp16", "fp32"):
            raise ValueError(f"values must be fp16 or fp32, got {values!r}")
        self._rank, self._values = check_integer("rank", rank, 1), Cast(values)
        self._feedback = check_flag("error_feedback", error_feedback)
        self._seed = check_integer("seed", common.get("seed", 0))  # Q is drawn before the first step
        super().__init__(named_parameters, **common)

    def work(self, bucket: Bucket) -> Work:
        return _PowerSGDWork(bucket, self._rank, self._values, self._feedback, self._seed)

    def options(self) -> dict[str, object]:
        own = {"rank": self._rank, "values": self._values, "error_feedback": self._feedback}
        return {**super().options(), **own}

    def state(self) -> dict[str, Tree]:
        return {"made_with": {"rank": Fixed(self._rank), "error feedback": Fixed(self._feedback)}}


class _PowerSGDWork(Work):
    def __init__(self, bucket: Bucket, rank: int, values: Cast, feedback: bool, seed: int) -> None:
        self._rank, self._values, self._feedback, self._seed = rank, values, feedback, seed
        #: A gradient from here on counts as infinite. Factors in float16 would need many steps to send a larger one.
        self._overflow = 2.0**22 if values.kind == "fp16" else OVERFLOW
        super().__init__(bucket)
        #: Whether a gradient of this step is not finite: bool, ().
        self._invalid = torch.zeros((), dtype=torch.bool, device=bucket.device)
        self.restart()

    def restart(self) -> None:
        #: Q of each piece, (m, rank), or None for one that is sent complete.
        self._q = [self._random_q(index) for index in range(len(self.bucket.pieces))]
        #: For undo(): the approximations subtracted from the residual, and Q before the step.
        self._sent: tuple[list[Tensor | None], list[Tensor | None]] | None = None

    def begin(self, step: Step) -> None:
        super().begin(step)
        self._invalid.zero_()
        self._sent = None
        if not self._feedback:
            self.bucket.residual.zero_()

    def accumulate(self) -> None:
        bucket = self.bucket
        for piece, grad in zip(bucket.pieces, bucket.gradients, strict=True):
            if grad.numel():
                step = grad.float() / self.step.scale
                fits = usable(step, self._overflow)
                self._invalid |= ~fits.all()
                piece.shaped(bucket.residual).add_(torch.where(fits, step, 0.0))

    def exchange(self) -> Exchange:
        bucket, ranks = self.bucket, self.step.ranks
        old_q = self._q
        matrices = [_matrix(piece, bucket.residual) for piece in bucket.pieces]  # M_i
        # Columns of norm 1: P has the gradient's magnitude, not its square, which float16 could not hold.
        pairs = zip(matrices, old_q, strict=True)
        products = [m if q is None else m @ torch.nn.functional.normalize(q, dim=0) for m, q in pairs]
        flag = bucket.residual.new_zeros(1).masked_fill_(self._invalid, torch.nan)
        payload = self._pack([flag, *products])
        sums = yield allreduce(payload, then="encode")
        valid, *p = _unpack(sums, [flag, *products], 1.0 / ranks)
        valid, own = valid.isfinite(), _unpack(payload, [flag, *products])[1:]
        p = [x if q is None else torch.linalg.qr(x)[0] for x, q in zip(p, old_q, strict=True)]  # P
        new_q = old_q
        if products := [m.T @ x for m, x, q in zip(matrices, p, old_q, strict=True) if q is not None]:
            payload = self._pack(products)
            means = iter(_unpack((yield allreduce(payload)), products, 1.0 / ranks))
            owns = iter(_unpack(payload, products))
            new_q = [None if q is None else torch.where(valid, next(means), q) for q in old_q]  # Q
            own = [o if q is None else x @ next(owns).T for o, x, q in zip(own, p, old_q, strict=True)]
        averages = [x if q is None else x @ q.T for x, q in zip(p, new_q, strict=True)]  # g
        sent: list[Tensor | None] = [None] * len(averages)
        for i, (piece, target) in enumerate(zip(bucket.pieces, bucket.gradients, strict=True)):
            if target.numel():  # else no gradient arrived, and the residual stays
                residual = piece.shaped(bucket.residual)
                contribution = sent[i] = torch.where(valid, own[i].view(residual.shape), 0.0)
                residual.sub_(contribution)
                target.copy_(torch.where(valid, averages[i].view(residual.shape) * self.step.scale, torch.nan))
        if not self._feedback:
            bucket.residual.zero_()
            sent = [None] * len(sent)
        self._sent, self._q = (sent, old_q), new_q

    def undo(self) -> None:
        if self._sent is not None:
            sent, self._q = self._sent
            for piece, average in zip(self.bucket.pieces, sent, strict=True):
                if average is not None:
                    piece.shaped(self.bucket.residual).add_(average)
            self._sent = None

    def state(self) -> dict[str, Tree]:
        q = zip(self.bucket.pieces, self._q, strict=True)
        return {**super().state(), "q": {piece.name: TensorLeaf(x) for piece, x in q if x is not None}}

    def _random_q(self, index: int) -> Tensor | None:
        n, m = _matrix(self.bucket.pieces[index], self.bucket.residual).shape
        rank = min(self._rank, n, m)
        if rank * (n + m) >= n * m:
            return None
        key = derive(self._seed, 0, self.bucket.index, index)
        generator = torch.Generator("cpu").manual_seed(key)
        q = torch.randn(m, rank, generator=generator, dtype=torch.float32, device="cpu")
        return q.to(self.bucket.device)

    def _pack(self, tensors: Sequence[Tensor]) -> Tensor:
        limit = self._values.limit(self.step.ranks)  # the sum must not overflow; the residual keeps the rest
        return torch.cat([x.flatten() for x in tensors]).clamp(-limit, limit).to(self._values.dtype)


def _unpack(flat: Tensor, like: Sequence[Tensor], factor: float = 1.0) -> list[Tensor]:
    parts = torch.split(flat.float() * factor, [x.numel() for x in like])
    return [part.view(x.shape) for part, x in zip(parts, like, strict=True)]


def _matrix(piece: Piece, flat: Tensor) -> Tensor:
    return piece.shaped(flat).flatten(1)
