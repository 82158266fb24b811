"""Types that pickers (how entries are picked, :mod:`.pickers`) and deciders (who picks, :mod:`.deciders`) share. A
*slot* is one value of the payload."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..engine.bucket import Bucket

#: A mean with which nothing is written and the residual stays. Every mean that is not finite has this effect.
NOT_SENT = float("nan")


@dataclass(frozen=True)
class Scoring:
    """Scores of the residual's entries: |residual| / (|weight| + floor), or |residual| without ``floors``.

    ``explore``: the share of blocks in which entries are drawn at random, in proportion to their scores. ``floors``:
    float32, (pieces,), or None.
    """

    explore: float = 0.0
    floors: Tensor | None = None

    def score(self, bucket: Bucket, index: int) -> Tensor:
        """The scores of a piece's entries, in memory order: float32, (entries,)."""
        piece = bucket.pieces[index]
        magnitude = piece.of(bucket.residual)[: piece.numel].abs()
        if self.floors is None:
            return magnitude
        return magnitude / (piece.flat_weight().float().abs() + self.floors[index])

    def weighted(self, bucket: Bucket, grads: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """``grads``, by piece, and the weights by which they are scored, if any, both of one dtype in a piece."""
        if self.floors is None:
            return grads, []
        weights = [piece.weight() for piece in bucket.pieces]
        mixed = [g.numel() > 0 and g.dtype != w.dtype for g, w in zip(grads, weights, strict=True)]
        if any(mixed):
            grads = [g.float() if m else g for g, m in zip(grads, mixed, strict=True)]
            weights = [w.float() if m else w for w, m in zip(weights, mixed, strict=True)]
        return grads, weights


@dataclass(frozen=True)
class Output:
    """The conversion of averages to gradients. ``scale``: a factor. ``transform``: from Walsh-Hadamard coefficients
    (:func:`hvd_compress.reference.hadamard`). ``sign``: gradients are replaced by their signs."""

    scale: float
    transform: bool = False
    sign: bool = False

    def write(self, bucket: Bucket, mean: Tensor, targets: list[Tensor]) -> None:
        """Writes averages of a whole bucket, float32, (blocks * 256,), to ``targets`` (one tensor per piece, or empty).
        Overwrites ``mean`` if ``transform`` is set."""
        if self.transform:
            ops.hadamard(mean)
            if self.sign:
                mean = signs(mean)
        for piece, target in zip(bucket.pieces, targets, strict=True):
            if target.numel():
                flat = target.as_strided((target.numel(),), (1,))
                torch.mul(piece.of(mean)[: target.numel()], self.scale, out=flat)


def signs(values: Tensor) -> Tensor:
    """The signs of all entries; NaN stays NaN, which ``torch.sign`` makes 0."""
    return torch.where(values.isnan(), values, values.sign())


@dataclass(frozen=True)
class Average:
    """The result of an exchange.

    ``mean``: over ranks, float32, (slots,). ``error``: this rank's quantization error, float32, (slots,).
    ``block_means``: added to every entry of a block, float32, (blocks,), or None.
    """

    mean: Tensor
    error: Tensor
    output: Output
    block_means: Tensor | None = None
