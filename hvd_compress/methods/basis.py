"""The basis of a residual: the gradients' own entries, or coefficients of a transform of them."""

from torch import Tensor

from ..engine.bucket import Bucket, Piece
from ..engine.state import TensorLeaf, Tree


class Basis:
    """The gradients' own entries."""

    #: Whether the operators transform gradients and averages themselves.
    transform = False

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def enter(self, grads: list[Tensor], scale: float, invalid: Tensor) -> list[Tensor]:
        """The tensors, by piece or empty, that the operators accumulate for these gradients. ``scale``: of the
        gradients. ``invalid``: int32, (1,), set to 1 if an entry is not finite."""
        return grads

    def targets(self, grads: list[Tensor]) -> list[Tensor]:
        """The tensors to which averages are written for these gradients: by piece, or empty."""
        return grads

    def leave(self, targets: list[Tensor], grads: list[Tensor], scale: float) -> None:
        """Transforms the averages in :meth:`targets` back, into the gradients, whose scale is ``scale``."""

    def entries(self, piece: Piece, part: Tensor) -> Tensor:
        """A piece's ``part`` of a residual or velocity, (blocks * 256,), in the piece's shape: a view or a copy."""
        return piece.reshaped(part)

    def write(self, piece: Piece, entries: Tensor, part: Tensor) -> None:
        """The inverse of :meth:`entries`: writes ``part``."""
        piece.reshaped(part).copy_(entries)

    def saved(self, flat: Tensor) -> Tree:
        """Describes a residual or velocity in a checkpoint."""
        return self._bucket.saved(flat, per_rank=True)


class Coefficients(Basis):
    def saved(self, flat: Tensor) -> Tree:
        return {piece.name: TensorLeaf(piece.of(flat), per_rank=True) for piece in self._bucket.pieces}
