"""The basis of a residual: the gradients' own entries, or coefficients of a transform of them."""

import torch
from torch import Tensor

from .. import ops
from ..engine.bucket import Bucket, Piece
from ..engine.state import TensorLeaf, Tree
from ..reference import OVERFLOW, usable
from . import spectrum


class Basis:
    """The gradients' own entries."""

    #: Whether the operators transform gradients and averages themselves.
    transform = False

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def enter(self, grads: list[Tensor], scale: float, invalid: Tensor) -> list[Tensor]:
        """The tensors that the operators accumulate for these gradients: by piece, or empty. ``scale``: of the
        gradients. ``invalid``: int32, (1,), set to 1 if an entry is not finite."""
        return grads

    def targets(self, grads: list[Tensor]) -> list[Tensor]:
        """The tensors to which averages are written for these gradients: by piece, or empty."""
        return grads

    def leave(self, grads: list[Tensor]) -> None:
        """Transforms the averages in :meth:`targets` back, into the gradients."""

    def entries(self, piece: Piece, part: Tensor) -> Tensor:
        """``part``, a piece's part of a residual or velocity, (blocks * 256,), as entries in its shape: a view or a
        copy."""
        return piece.reshaped(part)

    def write(self, piece: Piece, entries: Tensor, part: Tensor) -> None:
        """The inverse of :meth:`entries`: writes ``part``."""
        piece.reshaped(part).copy_(entries)

    def saved(self, flat: Tensor) -> Tree:
        """Describes a residual or velocity in a checkpoint."""
        return self._bucket.saved(flat, per_rank=True)


class _Coefficients(Basis):
    def saved(self, flat: Tensor) -> Tree:
        return {piece.name: TensorLeaf(piece.of(flat), per_rank=True) for piece in self._bucket.pieces}


class Hadamard(_Coefficients):
    """Coefficients of the Walsh-Hadamard transform of each block (:func:`hvd_compress.reference.hadamard`)."""

    transform = True

    def entries(self, piece: Piece, part: Tensor) -> Tensor:
        flat = part.clone()
        ops.hadamard(flat)
        return piece.reshaped(flat)

    def write(self, piece: Piece, entries: Tensor, part: Tensor) -> None:
        part.zero_()
        piece.reshaped(part).copy_(entries)
        ops.hadamard(part)


# A gradient from here on counts as infinite: a coefficient is less than 128 times the chunk's largest entry.
_OVERFLOW = OVERFLOW / 128


class Fourier(_Coefficients):
    """Coefficients of the real Fourier transform (:mod:`hvd_compress.methods.spectrum`)."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket)
        #: The gradients' coefficients before they are added to the residual, then those of the averages.
        self._spectra = bucket.zeros()

    def enter(self, grads: list[Tensor], scale: float, invalid: Tensor) -> list[Tensor]:
        for piece, grad in zip(self._bucket.pieces, grads, strict=True):
            if grad.numel():
                flat = grad.as_strided((grad.numel(),), (1,))
                # The transform would spread one infinity over its whole chunk: the other entries would be lost.
                fits = usable(flat, min(_OVERFLOW * scale, torch.finfo(torch.float32).max))
                invalid |= (~fits.all()).to(torch.int32)
                flat.masked_fill_(~fits, 0.0)
                spectrum.forward(flat, self._of(piece))
                flat.zero_()
        return self.targets(grads)

    def targets(self, grads: list[Tensor]) -> list[Tensor]:
        pairs = zip(self._bucket.pieces, grads, strict=True)
        return [self._of(piece) if grad.numel() else grad for piece, grad in pairs]

    def leave(self, grads: list[Tensor]) -> None:
        for piece, grad in zip(self._bucket.pieces, grads, strict=True):
            if grad.numel():
                spectrum.inverse(self._of(piece), grad.as_strided((grad.numel(),), (1,)))
        self._spectra.zero_()

    def entries(self, piece: Piece, part: Tensor) -> Tensor:
        flat = torch.empty(piece.numel, dtype=torch.float32, device=part.device)
        spectrum.inverse(part[: spectrum.padded(piece.numel)], flat)
        return piece.reshaped(flat)

    def write(self, piece: Piece, entries: Tensor, part: Tensor) -> None:
        flat = piece.reshaped(torch.empty(piece.numel, dtype=torch.float32, device=part.device)).copy_(entries)
        spectrum.forward(flat.as_strided((piece.numel,), (1,)), part[: spectrum.padded(piece.numel)])

    def _of(self, piece: Piece) -> Tensor:
        return piece.of(self._spectra)[: spectrum.padded(piece.numel)]
