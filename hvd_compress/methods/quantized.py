"""Every entry in 1 to 8 bits, with error feedback, by a reduce-scatter and an allgather of codes."""

from functools import partial
from typing import Any

from ..codecs.coded_ring import CodedRing
from ..codecs.grouped_ring import GroupedChannel
from ..codecs.packed import WideLloyd
from ..engine.arguments import NamedParameters, check_integer
from ..engine.bucket import Bucket
from .coded_work import CodedWork
from .every_entry import EveryEntry


class Quantized(EveryEntry):
    r"""Every entry of the gradient in a few bits, with error feedback; the bytes do not grow with the ranks.

    Implements the exchange of CGX (Markov et al., *CGX: Adaptive System Support for Communication-Efficient Deep
    Learning*, Middleware 2022), a reduce-scatter (alltoall) and an allgather of codes. On rank i of N, for every
    ``run`` of consecutive entries, with gradient g_i and residual r_i::

        a_i = r_i + g_i
        s   = rms(a_i)**(1 - p) (max |a_i| / max L)**p     p = 1/2 - 2**-b; 2 bytes, sent with the codes
        Q(x) = s L[c]                                      the level nearest to x / s: c, of b bits
        m   = (a_o + sum Q(a_i)) / N                       on the owner o of this part of the entries; i: the others
        g   = Q'(m)                                        with the scales of m, from the owner to all
        r_i = a_i - Q(a_i);  r_o = N (m - Q'(m))

    L are the Lloyd-Max levels of a Gaussian, which have the least mean squared error at p = 0 (Max 1960; Lloyd 1982);
    with 1 bit, -0.8 and 0.8. At p = 1 nothing would be clipped. Q' has ``mean_bits``. Error feedback for both encodings
    is that of DoubleSqueeze (Tang et al., ICML 2019). Ours: the levels; the scale between both, since clipped parts
    accumulate until they are sent; scales of their own in both directions; the owner's values, which it does not round.

    A rank sends ``(N - 1) / N ((bits + mean_bits) / 8 + 4 / run)`` bytes an entry. With
    :class:`~hvd_compress.LocalSteps`, the entries are differences of weights.

    Example::

        compression = hvd_compress.Quantized(model, bits=4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(compression, hvd_compress.ddp_hook)

    Args:
        bits: per entry, 1 to 8.
        mean_bits: per entry of the average, 1 to 8; None: ``bits``. The errors of the ranks' encodings cancel in part
            in the average, the average's own error does not: with ``bits=1`` and local steps of a period up to 8, 2 are
            worth their bytes.
        run: entries that share a scale, at least 8.
        error_feedback: keep both quantization errors for the next step. Without it, they are lost, and each part of the
            average leans to the values of the rank that averages it.

    Other arguments, and errors: see :class:`~hvd_compress.Compressor`.
    """

    def __init__(
        self,
        named_parameters: NamedParameters,
        bits: int = 4,
        *,
        mean_bits: int | None = None,
        run: int = 512,
        error_feedback: bool = True,
        **common: Any,
    ) -> None:
        mean = None if mean_bits is None else WideLloyd(check_integer("mean_bits", mean_bits, 1, 8))
        self._ring = CodedRing(WideLloyd(bits), run, mean)
        super().__init__(named_parameters, values=self._ring, error_feedback=error_feedback, **common)

    def work(self, bucket: Bucket) -> CodedWork:
        return CodedWork(bucket, partial(GroupedChannel, self._ring), self._feedback)
