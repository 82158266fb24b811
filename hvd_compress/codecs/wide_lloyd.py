"""Lloyd-Max codebooks for error feedback on all entries."""

from dataclasses import dataclass

from torch import Tensor, zeros_like

from ..reference.scales import bounded
from .codebooks import codebook
from .packed import Lloyd
from .scales import Moments


@dataclass(frozen=True)
class WideLloyd(Lloyd):
    """Codebooks for a Gaussian, for error feedback on all entries, where clipped parts accumulate until they are sent.
    The scale is ``rms**(1 - p) * (largest magnitude / largest level)**p`` with ``p = 1/2 - 2**-bits``: between the
    least squared error, p = 0, and no clipping, p = 1."""

    @property
    def name(self) -> str:
        return f"{self.bits} bits"

    def fitted(self, moments: Moments) -> tuple[Tensor, Tensor]:
        power, top = 0.5 - 2.0**-self.bits, float(codebook(self.bits)[0, -1])
        scale = moments.rms ** (1.0 - power) * (moments.peak * (1.0 / top)) ** power
        return bounded(scale), zeros_like(moments.kind)
