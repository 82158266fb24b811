"""Frequency-domain sparsification with range-based floats (Wang et al., HPDC 2020; arXiv 1811.08596)."""

from types import SimpleNamespace
from typing import Any

from ..codecs import Codec
from ..engine.arguments import NamedParameters
from ..engine.bucket import Bucket
from ..selection.schedule import Density
from .basis import Fourier
from .sparse import SparseMethod, exchanged_codec
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
        # What trained best at equal bytes (docs/results.md); the paper's.
        values = exchanged_codec(exchange, values, ring="lanes4", gather="range10-gather")
        self.arguments = SimpleNamespace(exchange=exchange)
        super().__init__(named_parameters, density, values=values, budget_interval=budget_interval, **common)

    def sparse_work(self, bucket: Bucket, sending: Sending) -> SparseWork:
        return SparseWork(bucket, sending, basis=Fourier(bucket), gathers=self.arguments.exchange == "gather")
