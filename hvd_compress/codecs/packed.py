"""Values encoded one by one and packed into bytes: codebooks."""

import abc
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, zeros_like

from .. import ops
from ..engine.arguments import check_integer
from ..reference.codes import store
from ..reference.scales import bounded
from .codebooks import codebook, codebook_on
from .scales import Moments, moments_table


class Code(abc.ABC):
    """Encodes values as bytes and back, given each group's scale and kind of distribution (:class:`.Moments`)."""

    #: The name without the number of bits.
    family: ClassVar[str]
    bits: int
    #: Whether the scale is the largest magnitude, not the root mean square.
    peak: bool

    @property
    def name(self) -> str:
        return f"{self.family}{self.bits}"

    def fitted(self, moments: Moments) -> tuple[Tensor, Tensor]:
        """The scale and the kind of distribution for values with these moments: float64 and int64, (groups,)."""
        return bounded(moments.peak if self.peak else moments.rms), moments.kind

    def size(self, count: int) -> int:
        """The bytes of ``count`` codes."""
        return -(-count // 8) * self.bits

    @abc.abstractmethod
    def encode(self, values: Tensor, scale: Tensor, kind: Tensor, edges: Tensor, codes: Tensor, error: Tensor) -> None:
        """Writes ``codes``, uint8, (size(count),), and the quantization ``error``, float32, (count,)."""

    @abc.abstractmethod
    def decode(self, codes: Tensor, scale: Tensor, kind: Tensor, edges: Tensor, values: Tensor, add: bool) -> None:
        """Writes the decoded values to ``values``, or adds them."""

    def mean(
        self, rows: Tensor, skip: int, scale: Tensor, kind: Tensor, edges: Tensor, values: Tensor, rank: int, to: Tensor
    ) -> Moments:
        """Writes the mean of all ranks' values, those of ``rank`` not rounded; returns its moments.

        ``rows``: uint8, (ranks, bytes): codes of the ranks, from byte ``skip`` on. ``scale``, ``kind``: (ranks,
        groups)."""
        for sender, row in enumerate(rows):
            if sender != rank:
                mine = row[skip:][: self.size(len(to))]
                self.decode(mine, scale[sender], kind[sender], edges, to, add=sender > 0)
            else:
                store(to, values, add=sender > 0)
        to.mul_(1.0 / len(rows))
        return Moments(to, edges)


@dataclass(frozen=True)
class Lloyd(Code):
    """The Lloyd-Max codebook (Max 1960, Lloyd 1982) of ``2**bits`` levels (1 to 8 bits) for the group's distribution,
    scaled by its root mean square."""

    bits: int
    family = "lloyd"
    peak = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", check_integer("bits of lloyd", self.bits, 1, 8))

    def encode(
        self, values: Tensor, scale: Tensor, kind: Tensor, edges: Tensor, codes: Tensor, error: Tensor | None
    ) -> None:
        """As of :class:`Code`; without an error if that is None."""
        book = codebook_on(self.bits, values.device)
        ops.codebook_encode(values, scale.float(), edges, book, kind, codes, error, self.bits)

    def decode(self, codes: Tensor, scale: Tensor, kind: Tensor, edges: Tensor, values: Tensor, add: bool) -> None:
        book = codebook_on(self.bits, values.device)
        ops.codebook_decode(codes, scale.float(), edges, book, kind, values, self.bits, add)

    def mean(
        self, rows: Tensor, skip: int, scale: Tensor, kind: Tensor, edges: Tensor, values: Tensor, rank: int, to: Tensor
    ) -> Moments:
        book, table = codebook_on(self.bits, to.device), moments_table(edges)
        ops.codebook_mean(rows, values, scale.float(), edges, book, kind, to, table, rank, skip, self.bits)
        return Moments(to, edges, table)


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
