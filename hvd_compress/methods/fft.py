"""Frequency-domain sparsification with range-based floats (Wang et al., HPDC 2020; arXiv 1811.08596)."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from ..codecs import Codec
from ..engine.arguments import NamedParameters
from ..engine.bucket import Bucket, Segment
from ..engine.exchange import Exchange
from ..reference import OVERFLOW, usable
from ..selection.schedule import Density
from . import spectrum
from .sparse import Plan
from .transformed import TransformedMethod

# From here on a gradient counts as infinite: a coefficient is less than 128 times the chunk's largest entry.
_OVERFLOW = OVERFLOW / 128


class FFT(TransformedMethod):
    r"""Frequency-domain sparsification: the largest Fourier coefficients are sent, the others stay in the residual.

    Implements the published idea of Wang et al., *FFT-based Gradient Sparsification for the Distributed Training of
    Deep Neural Networks* (HPDC 2020; arXiv 1811.08596). On rank i, for one parameter with gradient g_i and R_i, the
    residual of its spectrum; F is the real Fourier transform of chunks of 4096 entries, an orthonormal change of
    basis::

        U_i = momentum U_i + F g_i                    with momentum, else F g_i
        A_i = R_i + U_i
        S   = union over this step's leaders of their largest |A_i|, m of every 256
        g   = F^-1 (mean_i Q(A_i[S]) on S, 0 elsewhere)             Q: the codec
        R_i = A_i - Q(A_i[S]) on S, A_i elsewhere;  U_i[S] = 0

    The paper's: the largest coefficients; range-based floats (their definition is ours); a density that diminishes with
    the learning rate (:class:`~hvd_compress.schedule.Diminishing`); ``exchange="gather"``, where every rank selects its
    own frequencies and sends them to all, with a bitmap of indices where that is shorter, so that the bytes grow with
    the ranks. Ours: the residual in the frequency domain; real and imaginary parts selected separately, which at equal
    bytes keeps more energy than pairs; interior bins times sqrt(2), so that the transform preserves the norm; leaders
    and the ring, since the mean of coefficients is the coefficient of the mean, and one inverse transform is enough.

    Replicas stay bit-equal if all ranks compute the same inverse transform: on one type of CPU or GPU.

    Args:
        density: coefficients sent in a step as a share of the entries, in (0, 1], or a schedule:
            :class:`~hvd_compress.schedule.Diminishing` is the paper's.
        values: how values are encoded: the name of a codec or a codec (:mod:`hvd_compress.codecs`); None for
            ``"lanes4"`` with the ring, and range-based floats of 10 bits, ``"range10-gather"``, with the gather.
        exchange: ``"ring"`` or ``"gather"``.
        leaders: how many ranks, on average, select the coefficients of one block; None for all. Ring only.
        explore: share of the blocks in which coefficients are drawn at random in proportion to magnitude, in [0, 1].
        budget_interval: steps between updates of the parameters' shares of a bucket's slots by magnitude; 0 keeps them
            equal.
        warmup_steps, momentum: see :class:`~hvd_compress.IWP`.

    Other arguments, and errors: see :class:`~hvd_compress.Compressor`.
    """

    # What trained best at equal bytes (docs/benchmarks.md); the paper's.
    codecs: ClassVar[dict[str, str]] = {"ring": "lanes4", "gather": "range10-gather"}

    def __init__(
        self,
        named_parameters: NamedParameters,
        density: float | Density = 1 / 32,
        *,
        values: str | Codec | None = None,
        exchange: str = "ring",
        leaders: int | None = None,
        explore: float = 0.0,
        budget_interval: int = 100,
        warmup_steps: int = 0,
        momentum: float = 0.0,
        **common: Any,
    ) -> None:
        common.update(values=values, exchange=exchange, leaders=leaders, explore=explore)
        common.update(budget_interval=budget_interval, warmup_steps=warmup_steps, momentum=momentum)
        super().__init__(named_parameters, density, **common)
        #: The gradient's coefficients before they are added to the residual, then those of the average.
        self._spectra = [torch.zeros_like(bucket.residual) for bucket in self.buckets]

    def receive(self, bucket: Bucket, position: int, grad: Tensor) -> None:
        segment = bucket.segments[position]
        flat = grad.as_strided((grad.numel(),), (1,))
        # The transform would spread one infinity over its whole chunk: the other entries would be lost.
        fits = usable(flat, min(_OVERFLOW * self.scale, torch.finfo(torch.float32).max))
        self.invalidate(bucket, ~fits.all())
        flat.masked_fill_(~fits, 0.0)
        coefficients = self._coefficients(bucket, segment)
        spectrum.forward(flat, coefficients)
        flat.zero_()
        super().receive(bucket, position, coefficients)

    def exchange_values(self, bucket: Bucket, plan: Plan) -> Exchange:
        yield from super().exchange_values(bucket, plan)
        for segment, grad in zip(bucket.segments, bucket.gradients, strict=True):
            coefficients = self._coefficients(bucket, segment)
            if grad is not None:
                spectrum.inverse(coefficients, grad.as_strided((grad.numel(),), (1,)))
            coefficients.zero_()

    def targets(self, bucket: Bucket, plan: Plan) -> list[Tensor]:
        empty = torch.empty(0, dtype=torch.float32, device=bucket.device)
        pairs = zip(bucket.segments, bucket.arrived, strict=True)
        return [self._coefficients(bucket, segment) if here else empty for segment, here in pairs]

    def _coefficients(self, bucket: Bucket, segment: Segment) -> Tensor:
        return segment.of(self._spectra[bucket.index])[: spectrum.padded(segment.numel)]

    def entries(self, segment: Segment, part: Tensor) -> Tensor:
        flat = torch.empty(segment.numel, dtype=torch.float32, device=part.device)
        spectrum.inverse(part[: spectrum.padded(segment.numel)], flat)
        return segment.reshaped(flat)

    def coefficients(self, segment: Segment, entries: Tensor, part: Tensor) -> None:
        flat = segment.reshaped(torch.empty(segment.numel, dtype=torch.float32, device=part.device)).copy_(entries)
        spectrum.forward(flat.as_strided((segment.numel,), (1,)), part[: spectrum.padded(segment.numel)])
