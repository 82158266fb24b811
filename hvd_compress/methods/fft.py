"""Frequency-domain sparsification with range-based floats (Wang et al., HPDC 2020; arXiv 1811.08596)."""

from typing import Any

import torch
from torch import Tensor

from ..codecs import Codec
from ..engine.arguments import NamedParameters
from ..engine.bucket import Bucket, Piece
from ..reference import OVERFLOW, usable
from ..selection.schedule import Density
from . import spectrum
from .basis import Coefficients
from .gathering import exchanged_codec, exchanged_work
from .sparse import SparseMethod
from .sparse_work import Sending, SparseWork


class FFT(SparseMethod):
    r"""Frequency-domain sparsification: the largest Fourier coefficients are sent, the others stay in the residual.

    Implements the published idea of Wang et al., *FFT-based Gradient Sparsification for the Distributed Training of
    Deep Neural Networks* (HPDC 2020; arXiv 1811.08596). On rank i, for one parameter with gradient g_i and R_i, the
    residual of its spectrum; F is the real Fourier transform of chunks of 4096 entries, an orthonormal change of
    basis::

        U_i = momentum U_i + F g_i                    with momentum, else F g_i
        A_i = R_i + U_i
        S   = union over all ranks of their largest |A_i|, m of every 256
        g   = F^-1 (mean_i Q(A_i[S]) on S, 0 elsewhere)             Q: the codec
        R_i = A_i - Q(A_i[S]) on S, A_i elsewhere;  U_i[S] = 0

    The paper's: the largest coefficients; range-based floats (their definition is ours); a density that diminishes with
    the learning rate (:func:`hvd_compress.schedule.diminishing`); ``exchange="gather"``, where every rank selects its
    own frequencies and sends them to all, with a bitmap of indices where that is shorter, so that the bytes grow with
    the ranks. Ours: the residual in the frequency domain; real and imaginary parts selected separately, which at equal
    bytes keeps more energy than pairs; interior bins times sqrt(2), so that the transform preserves the norm; leaders
    and the ring, since the mean of coefficients is the coefficient of the mean, and one inverse transform is enough.

    Replicas stay bit-equal if all ranks compute the same inverse transform: on one type of CPU or GPU.

    Example::

        compression = hvd_compress.FFT(model, density=1 / 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        compression.take_momentum(optimizer)  # better accuracy
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(compression, hvd_compress.ddp_hook)

    Args:
        density: coefficients sent in a step as a share of the entries.
        values: None for ``"lanes4"`` with the ring, and range-based floats of 10 bits, ``"range10-gather"``, with the
            gather.
        exchange: ``"ring"`` or ``"gather"``.

    Other arguments, and errors: see :class:`~hvd_compress.methods.sparse.SparseMethod`.
    """

    _ordered = True

    def __init__(
        self,
        named_parameters: NamedParameters,
        density: float | Density = 1 / 32,
        *,
        values: str | Codec | None = None,
        exchange: str = "ring",
        budget_interval: int = 100,
        **common: Any,
    ) -> None:
        # The best at equal bytes (docs/results.md); the paper's.
        values = exchanged_codec(exchange, values, ring="lanes4", gather="range10-gather")
        self._exchange = exchange
        super().__init__(named_parameters, density, values=values, budget_interval=budget_interval, **common)

    def sparse_work(self, bucket: Bucket, sending: Sending) -> SparseWork:
        return exchanged_work(self._exchange)(bucket, sending, basis=Fourier(bucket))

    def options(self) -> dict[str, object]:
        return {**super().options(), "exchange": self._exchange}


# A gradient from here on counts as infinite: a coefficient is less than 128 times the chunk's largest entry.
_OVERFLOW = OVERFLOW / 128


class Fourier(Coefficients):
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

    def leave(self, targets: list[Tensor], grads: list[Tensor], scale: float) -> None:
        for target, grad in zip(targets, grads, strict=True):
            if grad.numel():
                spectrum.inverse(target, grad.as_strided((grad.numel(),), (1,)))
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
